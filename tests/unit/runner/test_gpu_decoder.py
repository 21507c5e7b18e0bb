from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.kernels.gpu.attention import ops as interpreted_attention
from loramux.kernels.reference import elementwise, lora_segmented
from loramux.kernels.select import select_device_kernels
from loramux.types.request import Selection
from loramux.types.step import StepPlan
from tests.chunk_factory import make_chunk
from tests.device_factory import SplitKGemms, device_engine, reference_engine
from tests.engine_factory import make_prompt
from tests.model_factory import tiny_transformers_model

pytest.importorskip("triton", reason="no Triton on this machine")

OP_FAMILIES = ["llama31", "qwen2", "qwen3", "gemma2", "gemma3"]
OP_FAMILIES += ["phi4_mini", "granite", "smollm3", "olmo2", "glm4"]


@pytest.mark.parametrize("family", OP_FAMILIES)
def test_every_family_equals_the_reference_in_any_chunks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers biases, head norms, sandwich norms, windows with their own rope, softcaps."""
    model = tiny_transformers_model(family)
    tokens = make_prompt(20, seed=2)
    whole = StepPlan((make_chunk(0, tokens, 0, [5, 1], ()),))
    expected = reference_engine(model, tmp_path).executor.logits(whole)[0]
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2)[1]
    parts = []
    for start, stop in ((0, 15), (15, 20)):
        piece = make_chunk(0, tokens[start:stop], start, [5, 1], ())
        parts.append(runner.logits(StepPlan((piece,)))[0])
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_split_k_gemms_give_what_whole_ones_give(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """o and down of every layer, with norms after them and without."""
    model = tiny_transformers_model(family)
    runner = device_engine(monkeypatch, model, tmp_path, max_sequences=2)[1]
    step = StepPlan((make_chunk(0, make_prompt(9, seed=2), 0, [5, 1], ()),))
    whole = runner.logits(step)[0]
    gemms = runner._decoder.gemms = SplitKGemms(2)
    torch.testing.assert_close(runner.logits(step)[0], whole, atol=1e-4, rtol=1e-4)
    assert len(gemms.num_outputs) == 2 * len(runner._decoder._layers)


def test_a_linear_without_a_dense_weight_computes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, runner = device_engine(
        monkeypatch, model, tmp_path, max_sequences=2, quantization="int8"
    )
    assert {linear.weight for linear in runner._decoder._layers[0].mlp} == {None}
    batch: list[tuple[tuple[int, ...], Selection]] = [(make_prompt(9, seed=2), ())]
    expected = reference_engine(model, tmp_path, quantization="int8").prompt_logits(batch)
    torch.testing.assert_close(engine.prompt_logits(batch), expected, atol=1e-4, rtol=1e-4)


def test_on_a_cpu_only_attention_goes_through_the_interpreter() -> None:
    kernels = select_device_kernels(torch.device("cpu"))
    assert kernels.attention is interpreted_attention
    assert (kernels.lora, kernels.elementwise) == (lora_segmented, elementwise)
