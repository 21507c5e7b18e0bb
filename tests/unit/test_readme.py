"""The first page that a stranger reads: short, and true. Its blocks are run by test_docs.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_is_short_and_shows_the_two_commands_on_its_first_screen() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 120
    first_screen = "\n".join(lines[:30])
    assert "make serve" in first_screen and "make test" in first_screen
    second_screen = "\n".join(lines[30:60])
    for words in ("## On a GPU", ".[gpu]", "=hf:", "loramux push"):
        assert words in second_screen


def test_nothing_is_left_to_fill_in() -> None:
    assert [number for number, line in enumerate(TEXT.splitlines(), 1) if "TO FILL" in line] == []


def test_the_table_of_adapters_has_those_that_are_shipped_with_their_ranks() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| rank (\d+)", TEXT, re.MULTILINE))
    configs = sorted((ROOT / "examples" / "adapters").glob("*/adapter_config.json"))
    assert rows == {path.parent.name: str(json.loads(path.read_text())["r"]) for path in configs}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_target_and_file_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)) <= targets
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
