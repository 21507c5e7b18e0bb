from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loramux.cli import bench
from loramux.cli.bench import PROGRAMS, ROOT, app, run_benchmark


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    return tmp_path


def test_a_program_gets_its_arguments_and_its_exit_status_is_returned(root: Path) -> None:
    (root / "benchmarks" / "count.py").write_text("import sys; sys.exit(len(sys.argv[1:]))")
    assert run_benchmark("benchmarks.count", [], root) == 0
    assert run_benchmark("benchmarks.count", ["--requests", "4", "--help"], root) == 3


def test_an_installation_without_the_repository_names_make_bench(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmark("benchmarks.engine", [], root) == 1
    assert "make bench" in capsys.readouterr().err


def test_a_program_imports_the_others_as_a_package(root: Path) -> None:
    (root / "benchmarks" / "other.py").write_text("STATUS = 7")
    text = "import sys; from benchmarks.other import STATUS; sys.exit(STATUS)"
    (root / "benchmarks" / "one.py").write_text(text)
    assert run_benchmark("benchmarks.one", [], root) == 7


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_command_runs_a_program_of_the_repository(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command in CliRunner().invoke(app, ["--help"]).output
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(bench, "run_benchmark", lambda *call: calls.append(call) or 0)
    result = CliRunner().invoke(app, [command, "--help", "x.json"])
    assert result.exit_code == 0
    module = PROGRAMS[command][0]
    assert calls == [(module, ["--help", "x.json"])]
    assert ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file()
