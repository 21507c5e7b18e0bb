"""The programs of `loramux bench` from arguments to files, on a tiny engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import kernels, step, trace
from benchmarks.lib.lora_cases import Case
from benchmarks.studies import trace_profile

# The last case has more tokens than the engine's largest batch.
CASES = [(1, "identical"), (4, "identical"), (4, "distinct"), (5, "distinct")]
TINY = ["--device", "cpu", "--model", "small", "--layers", "1", "--device-memory", "64"]


def run(
    program: Any, arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Run a program and return the sections of its record."""
    words = [*arguments, "--out", str(folder), "--name", "found"]
    monkeypatch.setattr(sys, "argv", [program.__name__, *words])
    program.main()
    assert (folder / "found.md").is_file()
    sections: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())["sections"]
    return sections


def test_step_has_a_row_for_each_batch_rank_and_number_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = ["--batches", "1,3", "--adapters", "1,2", "--ranks", "2,4", "--sites", "qkvo"]
    arguments = [*TINY, *work, "--context", "12", "--steps", "2"]
    (section,) = run(step, arguments, tmp_path, monkeypatch)
    rows = section["rows"]
    assert [(row["batch"], row["rank"], row["adapters"]) for row in rows] == [
        *((1, 2, 1), (1, 4, 1), (3, 2, 1), (3, 2, 2), (3, 4, 1), (3, 4, 2))
    ]
    for row in rows:
        assert 8 < row["context"] < 16
        assert row["base tok/s"] == pytest.approx(1e3 * row["batch"] / row["base step ms"])
        assert row["LoRA / base"] == pytest.approx(row["base step ms"] / row["LoRA step ms"])
        assert row["base / roofline"] == pytest.approx(row["base tok/s"] / row["roofline tok/s"])


@pytest.mark.slow
def test_step_times_generate_on_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = ["--batches", "1", "--context", "12", "--steps", "1", "--ranks", "2"]
    arguments = [*TINY, *work, "--transformers", "--generate", "2,5,3"]
    answers, _ = run(step, arguments, tmp_path, monkeypatch)
    theirs, ours = answers["rows"]
    assert ours["ratio"] == pytest.approx(ours["tok/s"] / theirs["tok/s"])


def test_step_cases_are_joined_with_the_peers_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [{"alone": 5.5, "added": 9.0, "vllm": 21.4, "vllm added": 24.3}] * 3
    monkeypatch.setattr(step, "time_peers", lambda folder: peers)
    few = [Case(tokens, "all", popularity, 6) for tokens, popularity in CASES]
    monkeypatch.setattr(step, "CASES", few)
    tmp_path.joinpath("lora_peers.py").touch()
    arguments = [*TINY, "--cases", "--peers", str(tmp_path), "--max-sequences", "4"]
    arguments += ["--context", "4", "--steps", "1"]
    (section,) = run(step, arguments, tmp_path, monkeypatch)
    assert [row["adapters"] for row in section["rows"]] == [1, 1, 4]
    assert section["rows"][0]["vllm added"] == 24.3
    assert set(section["panels"][0]["series"]) == {
        *("LoRA us per layer", "LoRA us per layer, graph", "goal us", "vllm added")
    }


def test_a_folder_without_peers_is_rejected_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for program in (step, kernels):
        with pytest.raises(SystemExit):
            program.make_parser().parse_args(["--peers", str(tmp_path)])
        assert f"{tmp_path} has no lora_peers.py" in capsys.readouterr().err


@pytest.mark.slow
def test_trace_runs_every_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--requests", "6", "--tokens", "2,4", "--many", "5", "--registered", "2,4"]
    sizes += ["--max-sequences", "4", "--punica-tokens", "8", "--seconds", "0.5", "--rate", "8"]
    loads = ["--loads", "2", "--load-rates", "40", "--round-s", "0.1", "--rounds", "1"]
    loads += ["--streams", "2", "--stream-prompt", "3"]
    every = ["--scenarios", ",".join(trace.SCENARIOS)]
    found = run(trace, [*TINY, *sizes, *loads, *every], tmp_path, monkeypatch)
    few, many, registered, cold, base, slora, punica = [section["rows"] for section in found]
    for rows in (few, many):
        assert [row["run"] for row in rows] == ["base 1", "LoRA 1"]
        for speed, name in (("output tok/s", ""), ("requests/s", "requests ")):
            alone, shared = (row[speed] for row in rows)
            assert rows[1][f"{name}/ base-only"] == pytest.approx(shared / alone)
        assert rows[0]["distinct adapters"] == 0 < rows[1]["distinct adapters"] <= 4
    assert [row["run"] for row in registered] == ["2 adapters", "4 adapters", "2 adapters, again"]
    assert [row["loads"] > 0 for row in cold] == [True, False, True] * 2
    assert [row["run"] for row in base][-1] == "on / off"
    assert all("first token P99 ms" in row for row in slora)
    assert [row["run"] for row in punica] == ["base", "identical", "uniform", "skewed", "distinct"]
    assert (punica[1]["adapters"], punica[4]["adapters"]) == (1, 6)
    assert all(section["notes"] and section["panels"] for section in found)


@pytest.mark.parametrize(
    ("given", "backlog", "requests"),
    [([], 256, 6 * 256), (["--backlog", "64"], 64, 5 * 256 + 64), (["--requests", "9"], 256, 9)],
)
def test_the_default_backlog_is_the_batch_size(
    given: list[str], backlog: int, requests: int
) -> None:
    """The default number of requests gives a window with a full batch."""
    words = ["--device", "cuda", "--max-sequences", "256", *given]
    arguments = trace.make_parser().parse_args(words)
    trace.fill_defaults(arguments)
    assert (arguments.backlog, arguments.requests) == (backlog, requests)


def test_kernels_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = kernels.cpu_kernels.CASES[:2]
    monkeypatch.setattr(kernels.cpu_kernels, "CASES", cases)
    (section,) = run(kernels, ["--device", "cpu"], tmp_path, monkeypatch)
    assert [row["sites"] for row in section["rows"]] == ["qkvo", "all"]


def test_plot_from_draws_a_record_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    record = {"benchmark": "b", "machine": {}, "sections": []}
    file = tmp_path / "elsewhere.json"
    file.write_text(json.dumps(record))
    for program in (kernels, step, trace):
        monkeypatch.setattr(sys, "argv", ["bench", "--plot-from", str(file)])
        with pytest.raises(SystemExit) as stopped:
            program.main()
        assert not stopped.value.code
        file.with_suffix(".png").unlink()


@pytest.fixture
def profiler_of_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the profiler, since a CPU has no kernels to profile."""
    stream = {"stream": 7, "grid": [3, 1, 1]}
    kernel = {"ph": "X", "cat": "kernel", "name": "_choose", "dur": 5.0, "args": stream}
    events = [{**kernel, "ts": 10.0 * number} for number in range(3)]
    monkeypatch.setattr(trace_profile, "is_gpu", lambda _: True)
    monkeypatch.setattr(trace_profile, "_events", lambda _: events)
    stopwatch = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr("torch.profiler.profile", lambda **_: stopwatch)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)


TINY_TRACE = [*TINY, "--requests", "12", "--many", "3", "--max-sequences", "2", "--tokens", "3,6"]


@pytest.mark.usefixtures("profiler_of_three_steps")
def test_a_profile_has_base_and_lora_rows_of_each_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*TINY_TRACE, "--first", "3", "--steps", "2"]
    many, few = run(trace_profile, arguments, tmp_path, monkeypatch)
    for section in (many, few):
        assert [row["run"] for row in section["rows"]] == ["base", "LoRA"]
        assert all(row["steps"] == 2 and row["sampling"] == 5.0 for row in section["rows"])


@pytest.mark.usefixtures("profiler_of_three_steps")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--scenarios", "base"], "only many and few"), (["--first", "9999"], "too few steps")],
)
def test_a_profile_that_cannot_be_made_names_the_reason(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(trace_profile, [*TINY_TRACE, *arguments], tmp_path, monkeypatch)
    assert reason in str(stopped.value) + capsys.readouterr().err
