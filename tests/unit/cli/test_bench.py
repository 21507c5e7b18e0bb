from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loramux.cli import bench
from loramux.cli.bench import BENCHMARKS, app, run_benchmark


def test_a_benchmark_gets_its_arguments_and_its_status_comes_back(tmp_path: Path) -> None:
    program = tmp_path / "count.py"
    program.write_text("import sys; sys.exit(len(sys.argv[1:]))")
    assert run_benchmark(program, []) == 0
    assert run_benchmark(program, ["--requests", "4", "--help"]) == 3


def test_an_installation_without_the_repository_says_where_benchmarks_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmark(tmp_path / "engine_throughput.py", []) == 1
    assert "make bench" in capsys.readouterr().err


def test_a_benchmark_finds_the_others_as_a_package(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "other.py").write_text("STATUS = 7")
    program = tmp_path / "benchmarks" / "one.py"
    program.write_text("import sys; from benchmarks.other import STATUS; sys.exit(STATUS)")
    assert run_benchmark(program, []) == 7


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("engine", "engine_throughput.py"),
        ("kernels", "bench_kernels.py"),
        ("step", "bench_step.py"),
        ("trace", "bench_trace.py"),
        ("goals", "bench_goals.py"),
        ("plot", "plots.py"),
    ],
)
def test_the_repository_has_the_program_behind_every_command(
    command: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command in CliRunner().invoke(app, ["--help"]).output
    asked: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(bench, "run_benchmark", lambda *call: asked.append(call) or 0)
    result = CliRunner().invoke(app, [command, "--help", "x.json"])
    assert result.exit_code == 0
    assert asked == [(BENCHMARKS / program, ["--help", "x.json"])]
    assert (BENCHMARKS / program).is_file()
