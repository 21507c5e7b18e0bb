"""What `make` installs, and when: the targets for users install no tools of development."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = """#!/usr/bin/env bash
echo "$@" >> calls
mkdir -p .venv/bin && printf '#!/bin/sh\\n' > .venv/bin/loramux && chmod +x .venv/bin/loramux
"""


class Checkout:
    """A folder with the Makefile, and a set-up that only writes down its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (ROOT / "Makefile").read_text()
        (folder / "Makefile").write_text(text)
        (inputs,) = re.findall(r"^INPUTS := (.*)$", text, re.M)
        (folder / "scripts").mkdir()
        for name in inputs.split():
            if name != "Makefile":
                (folder / name).touch()
        (folder / "scripts/setup.sh").write_text(SETUP)
        self._before(*inputs.split())

    def _before(self, *names: str) -> None:
        """Make files older than what will be made."""
        for name in names:
            os.utime(self.folder / name, (1_000_000_000, 1_000_000_000))

    def make(self, target: str) -> list[str]:
        """Return the calls of the set-up."""
        calls = self.folder / "calls"
        calls.write_text("")
        environment = {**os.environ, "MAKEFLAGS": ""}
        subprocess.run(["make", target], cwd=self.folder, env=environment, check=True)
        return calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_first_start_installs_what_a_server_needs_and_the_second_nothing(
    checkout: Checkout,
) -> None:
    assert checkout.make("serve") == [".venv serve"]
    assert checkout.make("serve") == checkout.make("draw") == []


def test_the_tools_of_development_come_when_they_are_needed(checkout: Checkout) -> None:
    checkout.make("serve")
    assert checkout.make("setup") == [".venv"]
    assert checkout.make("setup") == checkout.make("serve") == []


def test_a_change_of_the_versions_is_installed(checkout: Checkout) -> None:
    checkout.make("setup")
    newest = (checkout.folder / ".venv/.installed").stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (newest, newest))
    assert checkout.make("serve") == [".venv serve"]
    assert checkout.make("setup") == [".venv"]
