"""Writes the table of refused fields into docs/other-servers.md."""

from __future__ import annotations

from pathlib import Path

from loramux.server.generate.checked_fields import field_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "other-servers.md"
BEGIN, END = "<!-- refused -->\n", "<!-- /refused -->"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + field_table() + END + after)


if __name__ == "__main__":
    main()
