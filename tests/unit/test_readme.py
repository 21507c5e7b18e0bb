"""The README is a program: its blocks run in order, in one folder, as a reader would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
TOOLS = {
    ".venv/bin/python": [sys.executable],
    ".venv/bin/loramux": [sys.executable, "-m", "loramux.cli.main"],
}


def documented_commands() -> Iterator[list[str]]:
    for language, block in BLOCKS:
        if language == "python":
            yield [sys.executable, "-c", block]
        elif language == "sh":
            for line in block.splitlines():
                tool, *arguments = shlex.split(line, comments=True) or ["make"]
                if tool != "make":
                    yield [*TOOLS[tool], *arguments]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the reader's view of the repository, where adapters/ may be written."""
    for name in ("examples", "loramux"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_every_command_and_program_in_the_readme_runs(checkout: Path) -> None:
    printed = ""
    for command in documented_commands():
        result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        printed = result.stdout
    answers = dict(line.strip().split(": ", 1) for line in printed.splitlines())
    assert set(answers) == {"base", "red", "blue"}
    assert len(set(answers.values())) == 3, "adapters made no difference"


def test_every_make_target_in_the_readme_exists() -> None:
    named = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
