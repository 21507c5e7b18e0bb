"""Where commands look, and how they fail: one sentence, a status, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from loramux.cli.registry_options import reporting_errors
from loramux.errors import AdapterNotFound, InvalidRequest
from tests.cli_factory import NAME, Shell

COMMANDS = ["push", "pull", "list", "show", "promote", "rollback", "split", "rm", "gc", "verify"]
NO_HEAVY_IMPORTS = """
import sys
from loramux.cli.main import app
try:
    app({arguments!r})
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = [name for name in {heavy!r} if name in sys.modules]
assert not heavy, heavy
"""


def run_python(arguments: list[str], heavy: list[str]) -> subprocess.CompletedProcess[str]:
    code = NO_HEAVY_IMPORTS.format(arguments=arguments, heavy=heavy)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_loads_neither_torch_nor_a_database_driver() -> None:
    heavy = ["torch", "sqlalchemy", "cryptography", "numpy"]
    result = run_python(["push", "--help"], heavy)
    assert result.returncode == 0, result.stderr


def test_a_push_never_loads_torch(shell: Shell) -> None:
    words = ["push", str(shell.adapter()), f"{NAME}@1.0.0", "--data", str(shell.data)]
    result = run_python(words, ["torch", "transformers"])
    assert result.returncode == 0, result.stderr
    assert shell.json("list")["adapters"][0]["adapter"] == NAME


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_data_options(command: str, shell: Shell) -> None:
    result = shell.run_bare(command, "--help")
    assert result.exit_code == 0
    for word in ("--registry", "--data", "LORAMUX_REGISTRY", "LORAMUX_DATA"):
        assert word in result.output


def test_the_registry_may_be_elsewhere_than_the_store(shell: Shell) -> None:
    path = shell.folder / "elsewhere" / "names.db"
    shell.ok("push", shell.adapter(), f"{NAME}@1.0.0", "--registry", path)
    assert path.is_file()
    assert not (shell.data / "registry.db").exists()
    url = f"sqlite:///{path}"
    assert len(shell.json("list", "--registry", url)["adapters"]) == 1


@pytest.mark.parametrize(
    ("status", "registry"),
    [(2, "mysql://host/db"), (2, "://"), (1, "/dev/null/registry.db")],
)
def test_a_registry_that_cannot_be_opened_is_one_sentence(
    status: int, registry: str, shell: Shell
) -> None:
    result = shell.run("list", "--registry", registry)
    assert result.exit_code == status
    assert result.stderr.startswith("error: ")


def test_a_password_is_not_shown(shell: Shell) -> None:
    url = "postgresql://loramux:hunter2@127.0.0.1:1/names"
    result = shell.run("list", "--registry", url)
    assert result.exit_code == 1
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("status", "error"),
    [(2, InvalidRequest("no")), (1, AdapterNotFound("no")), (1, PermissionError("no"))],
)
def test_errors_become_a_status(status: int, error: Exception) -> None:
    with pytest.raises(typer.Exit) as ended, reporting_errors():
        raise error
    assert ended.value.exit_code == status


def test_a_missing_extra_is_named_and_another_missing_module_is_a_bug(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit), reporting_errors():
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy.exc")
    assert "loramux[registry]" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError), reporting_errors():
        raise ModuleNotFoundError("No module named 'loramux.typo'", name="loramux.typo")


def test_a_file_in_the_way_of_the_store_is_one_sentence(shell: Shell, tmp_path: Path) -> None:
    shell.data.write_text("a file")
    result = shell.run("verify", "--registry", tmp_path / "names.db")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
