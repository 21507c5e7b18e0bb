from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from loramux import __version__
from loramux.cli.main import REGISTRY_COMMANDS, app


def test_version_is_the_package_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, f"loramux {__version__}")


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "chat", "doctor", "plan", "top", "tune", "bench", "receipts"):
        assert command in result.output
    for command in REGISTRY_COMMANDS:
        assert f" {command} " in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["sevre"]).exit_code == 2


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "loramux.cli.main", "--version"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.strip() == f"loramux {__version__}"
