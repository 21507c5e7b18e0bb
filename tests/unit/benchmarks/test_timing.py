"""Timing, power sampling, rooflines and LoRA cases of the benchmarks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lib import cpu_kernels
from benchmarks.lib.lora_cases import CASES, Case
from benchmarks.lib.machine import PowerMeter, visible_device
from benchmarks.lib.random_weights import SHAPES, llama_settings
from benchmarks.lib.roofline import H200_BYTES_PER_S, H200_FLOPS, measure_cpu, roofline_of
from benchmarks.lib.timing import StepTime, drift_of, graph_seconds, mean_of
from benchmarks.lib.traffic import make_request
from loramux.models.architectures import parse_config
from loramux.models.decoder import Decoder
from loramux.models.loader import LoadedModel, done
from tests.device_factory import device_engine
from tests.model_factory import tiny_transformers_model

COLD = StepTime(batch=4, step_s=1.0, graph_s=0.8, context=64.0, prompt_tokens_per_s=9.0)


def test_several_timings_have_a_mean() -> None:
    found = mean_of([COLD, replace(COLD, step_s=2.0, graph_s=1.2)])
    assert found.step_s == 1.5 and found.tokens_per_s == pytest.approx(4 / 1.5)
    assert found.graph_s == pytest.approx(1.0) and found.batch == 4


def test_without_graphs_there_is_no_mean_graph_time() -> None:
    alone = replace(COLD, graph_s=None)
    assert mean_of([alone, alone]).graph_s is None


def test_drift_compares_the_last_quarter_with_the_first() -> None:
    assert drift_of([0.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]) == 0.5
    assert drift_of([5.0, 6.0]) == 1.0


SCRIPT = """#!/bin/sh
echo "$@" > {folder}/arguments
echo "700.50, 1600"
echo "[N/A], 1600"
echo "699.50, 1500"
echo "cut o"
touch {folder}/told
exec sleep 60
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(SCRIPT.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_samples_are_averaged_and_nvidia_smi_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    meter = PowerMeter(device=2)
    with meter:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
    assert meter._process is not None and meter._process.poll() is not None
    whole, last = meter.mean(), meter.mean(1)
    assert whole is not None and (whole.watts, whole.mhz) == (700.0, 1550.0)
    assert last is not None and (last.watts, last.mhz) == (699.5, 1500.0)
    assert meter.num_samples == 2 and meter.mean(2) is None
    assert "--id=2" in (tmp_path / "arguments").read_text()


def test_without_nvidia_smi_there_are_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with PowerMeter() as meter:
        assert meter.mean() is None


@pytest.mark.parametrize(("value", "device"), [("3,1", 3), ("GPU-8f2", 0), ("", 0)])
def test_the_metered_gpu_is_the_first_visible_one(
    value: str, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_device() == device
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_device() == 0


def shapes_only(name: str) -> LoadedModel:
    config = parse_config(llama_settings(SHAPES[name]))
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    return LoadedModel(
        decoder=decoder,
        config=config,
        name=name,
        tokenizer_folder=Path(),
        eos_token_ids=(),
        reading=done(""),
    )


def test_the_roofline_of_llama_8b_on_an_h200_is_the_published_one() -> None:
    limit = roofline_of(shapes_only("llama-3.1-8b"), bytes_per_s=H200_BYTES_PER_S, flops=H200_FLOPS)
    assert limit.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert limit.kv_bytes_per_token == 128 * 1024
    speeds = [limit.tokens_per_s(batch, 512) for batch in (1, 32, 128, 256)]
    assert speeds == pytest.approx([285, 8_000, 23_300, 28_900], rel=0.01)


def test_the_weights_of_a_step_are_those_of_the_decoder_but_the_embedding() -> None:
    model = shapes_only("smollm2-135m")
    matrices = sum(p.numel() for p in model.decoder.parameters() if p.dim() == 2)
    limit = roofline_of(model, bytes_per_s=1.0, flops=1.0)
    # The embedding is the head here, which every step reads.
    assert limit.num_weights == matrices


def test_a_cpu_is_measured() -> None:
    assert all(speed > 0 for speed in measure_cpu(torch.float32))


def test_the_nine_cases_have_the_adapters_that_peers_were_measured_with() -> None:
    found = [(case.num_tokens, case.sites, case.num_adapters) for case in CASES]
    assert found == [
        *((1, "qkvo", 1), (1, "all", 1), (32, "qkvo", 1), (32, "qkvo", 32), (32, "all", 9)),
        *((32, "all", 32), (256, "qkvo", 40), (256, "all", 40), (256, "all", 256)),
    ]


def test_tokens_of_an_adapter_are_adjacent_and_every_adapter_has_one() -> None:
    ids = Case(64, "all", "skewed", 0.0).adapters()
    assert torch.equal(ids, ids.sort().values)
    assert len(ids.unique()) == int(ids.max()) + 1


def test_the_cpu_kernels_are_timed_and_checked() -> None:
    row = cpu_kernels.time_case(Case(8, "all", "skewed", 0.0), num_runs=1)
    assert row["tokens"] == 8 and all(float(str(row[n])) > 0 for n in ("base", "alone"))


def test_segments_cover_all_tokens() -> None:
    segments = cpu_kernels.segments_of([0, 0, 1, 3, 3, 3])
    assert [(s.slot, s.start, s.stop) for s in segments] == [(0, 0, 2), (1, 2, 3), (3, 3, 6)]


def test_graph_seconds_replays_the_graph_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine = device_engine(monkeypatch, model, tmp_path / "model", max_sequences=2)[0]
    assert graph_seconds(engine, 1, has_lora=False) is None, "a CPU has no CUDA graph"
    engine.add(make_request("one", (3, 4, 5), (), 4))
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(type(engine.executor), "is_gpu", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seconds = graph_seconds(engine, 1, has_lora=False)
    assert seconds is not None and seconds > 0
    engine.close()
