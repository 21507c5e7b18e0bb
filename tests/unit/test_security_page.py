"""docs/SECURITY.md names tests that exist and flags that the server has."""

from __future__ import annotations

import re
from pathlib import Path

from loramux.config.fields import flag
from loramux.config.serve import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "SECURITY.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| .+\| (`te.+`) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for name in (name for row in rows for name in re.findall(r"`([^`]+)`", row)):
        if name.endswith(".py"):
            assert (ROOT / name).exists(), name
        else:
            assert any(f"def {name}(" in source for source in sources), name


def test_the_hardened_server_has_flags_of_the_server() -> None:
    (command,) = re.findall(r"^loramux serve .+?```", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"--[\w-]+", command)) <= {flag(name) for name in SETTINGS}
