"""Checks that the version, the changelog and the tag of a release are one.

python scripts/check_release.py [--tag v0.2.0] [--notes FILE]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


def version_of(init: str) -> str:
    """Return the version that the package's source names."""
    found = re.search(r'^__version__ = "([^"]+)"$', init, re.MULTILINE)
    return "" if found is None else found[1]


def notes_of(changelog: str, version: str) -> str:
    """Return the section of a version; raise ValueError if it is not dated or has no text."""
    sections = list(_SECTION.finditer(changelog))
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        if section["name"] == version:
            text = changelog[section.end() : following.start() if following else None].strip()
            if section["date"] is None:
                raise ValueError(f"CHANGELOG.md has no date for {version}")
            if not text:
                raise ValueError(f"CHANGELOG.md says nothing of {version}")
            return text
    raise ValueError(f"CHANGELOG.md has no section ## [{version}] - YYYY-MM-DD")


def main() -> int:
    """Check the checkout; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag")
    parser.add_argument("--notes", type=Path)
    options = parser.parse_args()
    version = version_of((ROOT / "loramux" / "__init__.py").read_text())
    if options.tag is not None and options.tag != f"v{version}":
        print(f"the tag {options.tag} is not v{version}, the version of loramux/__init__.py")
        return 1
    try:
        notes = notes_of((ROOT / "CHANGELOG.md").read_text(), version)
    except ValueError as error:
        print(error)
        return 1
    if options.notes is not None:
        options.notes.write_text(notes + "\n")
    print(f"{version}: {len(notes.splitlines())} lines of changes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
