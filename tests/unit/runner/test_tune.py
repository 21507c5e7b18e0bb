"""The shapes that `loramux tune` covers are those of the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.ops import Norm
from loramux.kernels.reference import elementwise as reference
from loramux.models.architectures import DecoderConfig, parse_config
from loramux.runner import tune
from loramux.runner.decode_graphs import BATCH_SIZES
from loramux.runner.prefill_graphs import TOKEN_COUNTS
from loramux.runner.tune import (
    LinearShape,
    TuneOptions,
    appended_blocks,
    linear_shapes,
    row_counts,
    tune_model,
)
from tests.gemm_factory import FakeCublasLt
from tests.model_factory import tiny_transformers_model

CPU = torch.device("cpu")


def config(family: str = "llama", **settings: Any) -> DecoderConfig:
    model = tiny_transformers_model(family, **settings)
    return parse_config({**model.config.to_dict(), "architectures": [type(model).__name__]})


def test_every_linear_without_a_bias_is_tuned() -> None:
    llama = config()
    found = {shape.name: shape for shape in linear_shapes(llama)}
    assert list(found) == ["qkv", "o", "gate_up", "down", "lm_head"]
    assert found["gate_up"].num_outputs == 2 * llama.intermediate_size
    assert found["qkv"].num_inputs == llama.hidden_size
    assert "qkv" not in {shape.name for shape in linear_shapes(config("qwen2"))}


def test_row_counts_are_those_of_the_graphs() -> None:
    assert row_counts(33) == sorted(c for c in {*BATCH_SIZES, *TOKEN_COUNTS} if 33 <= c <= 1024)


def test_appended_blocks_follow_the_launch() -> None:
    assert appended_blocks(48, 0) == [0]
    assert appended_blocks(48, 64) == [0, 4]
    assert appended_blocks(48, 256) == [0, 8, 16]
    assert appended_blocks(256, 256) == [0, 8]


def test_a_cpu_has_nothing_to_tune() -> None:
    with pytest.raises(UnsupportedModel, match="NVIDIA GPU"):
        tune_model(config(), CPU, TuneOptions(), lambda stage, done: None)


def test_all_shapes_of_a_model_are_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCublasLt({1: (b"0.5",), 2: (b"0.4",)})
    monkeypatch.setattr(tune, "open_cublaslt", lambda device: library)
    monkeypatch.setattr(tune, "num_cold_weights", lambda num_bytes: 2)
    monkeypatch.setattr(tune, "row_counts", lambda min_rows: [48, 128])
    monkeypatch.setattr(tune, "Timing", lambda *args: library.timing())
    stages: list[str] = []
    llama = config()
    table = tune_model(
        llama,
        CPU,
        TuneOptions(augmented_ranks=16),
        lambda stage, done: stages.append(stage),
    )
    assert table.cublaslt_version == library.version
    assert stages == [*(f"Tuning {s.name}" for s in linear_shapes(llama)), "Tuning"]
    hidden, inner = llama.hidden_size, llama.intermediate_size
    for m in (16, 48, 49, 128):
        for n, k in ((hidden, inner), (hidden + 16, inner), (2 * inner + 32, hidden)):
            assert table.find(m, n, k, torch.bfloat16) is not None, (m, n, k)
    down = table.find(128, hidden, inner, torch.bfloat16)
    assert down is not None and down.algorithm == b"0.5"
    assert table.find(129, hidden, inner, torch.bfloat16) is None


def test_the_autotuner_times_add_norm_of_the_outputs() -> None:
    """With and without appended columns, split-K and whole."""
    seen: list[tuple[int, ...]] = []

    class Elementwise:
        def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
            seen.append((*x.shape, *residual.shape))
            return reference.add_norm(x, residual, norm)

    ops: Any = Elementwise()
    consumer = tune._consumer(LinearShape("o", 4, 8, is_added=True), ops, torch.float16, CPU)
    assert consumer is not None
    for shape in ((3, 4), (3, 6), (2, 3, 6)):
        consumer(torch.randn(shape))()
    assert seen == [(3, 4, 3, 4), (3, 4, 3, 4), (2, 3, 4, 3, 4)]
    assert tune._consumer(LinearShape("qkv", 4, 8), ops, torch.float16, CPU) is None
