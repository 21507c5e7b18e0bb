from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

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


def test_the_repository_has_the_program_behind_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "engine" in result.output
    assert (BENCHMARKS / "engine_throughput.py").is_file()
