"""Adapters whose values overflow: they end with an error, and change no row beside theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.engine.engine import Engine
from loramux.errors import AdapterRefused
from loramux.kernels.cpu import attention as cpu_attention
from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.models.layers import Linear
from loramux.models.packed_linear import TILE_DEPTH, PackedLinear, can_pack
from loramux.types.model import PagedLayout
from loramux.types.request import FinishReason, TokenEvent
from loramux.types.step import Chunk, StepPlan
from tests.adapter_factory import make_peft_adapter
from tests.device_factory import lease, row
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

# Values of LORAMUX_KERNELS.
KERNELS = ("torch", "cpu", "")
# Inner sizes that are multiples of 32, and others.
SIZES: dict[str, dict[str, Any]] = {
    "whole tiles": {"intermediate_size": 96},
    "parts of tiles": {"hidden_size": 40, "head_dim": 12, "intermediate_size": 72},
}
# Largest values of A and B, and what they change.
WEIGHTS: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "scores": (1.0, 1.5e19, ("q_proj", "k_proj")),
    "hidden states": (1.0, 1.5e19, ("down_proj", "o_proj")),
    "everything": (1.0, 1.5e19, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")),
    "denormal": (1e-40, 1.0, ("q_proj", "down_proj")),
    "harmless": (1.0, 0.1, ("q_proj", "down_proj")),
}


def scaled_adapter(folder: Path, model: Any, name: str) -> Path:
    a, b, places = WEIGHTS[name]
    # One rank: another order of the sum could not hide an overflow.
    made = make_peft_adapter(folder, model, r=1, lora_alpha=1, target_modules=list(places))
    file = made / "adapter_model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        tensors[key] = tensor / tensor.abs().max() * (a if ".lora_A." in key else b)
    save_file(tensors, file)
    return made


def engine_with(
    tmp_path: Path, size: str, kernels: str, patch: pytest.MonkeyPatch
) -> tuple[Engine, dict[str, str]]:
    model = tiny_transformers_model("llama", num_hidden_layers=2, **SIZES[size])
    with patch.context() as scoped:
        scoped.setenv("LORAMUX_KERNELS", kernels)
        engine = make_engine(model, tmp_path / "model", loads=InlineExecutor())
    folders = {name: scaled_adapter(tmp_path / name, model, name) for name in WEIGHTS}
    good = make_peft_adapter(tmp_path / "good", model, seed=9, r=4)
    cids = {name: engine.register_adapter(folder).cid for name, folder in folders.items()}
    return engine, cids | {"good": engine.register_adapter(good).cid}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_that_overflows_changes_no_bit_of_other_rows_and_gets_no_token(
    size: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cids = engine_with(tmp_path, size, kernels, monkeypatch)
    good = ((cids["good"], 1.0),)
    lengths = (1, 5, 9, 4, 17)
    # Adapters have the first pages of the pool.
    last = engine.pages.num_pages - 1

    def step(other: str) -> StepPlan:
        bad = ((cids[other], 1.0),)
        lease(engine, good, bad)
        selections = (good, bad, (), bad, good)
        return StepPlan(
            tuple(
                Chunk(i, make_prompt(n, seed=i), 0, [last - i, last - i - 8], selections[i], row())
                for i, n in enumerate(lengths)
            )
        )

    expected = engine.executor.logits(step("harmless"))
    for name in WEIGHTS:
        plan = step(name)
        logits = engine.executor.logits(plan)
        for number in (0, 2, 4):
            assert torch.equal(logits[number], expected[number]), (name, number)
        result = engine.executor.launch(plan).result()
        overflows = WEIGHTS[name][1] > 1e9
        assert sorted(result.failed) == ([1, 3] if overflows else []), name
        engine.residency.release([cids["good"], cids[name]])


def test_a_request_that_overflows_ends_with_an_error_that_names_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cids = engine_with(tmp_path, "whole tiles", "cpu", monkeypatch)
    prompt = make_prompt(20, seed=1)
    engine.add(make_request("good", prompt, ((cids["good"], 1.0),), max_tokens=3))
    engine.add(make_request("bad", prompt, ((cids["scores"], 1.0),), max_tokens=3))
    bad = ((cids["scores"], 1.0),)
    engine.add(make_request("asks", prompt, bad, max_tokens=0, prompt_logprobs=0))
    events: dict[str, list[TokenEvent]] = {"good": [], "bad": [], "asks": []}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
    assert [e.error for e in events["good"]] == [None] * 3
    for name in ("bad", "asks"):
        (end,) = events[name]
        assert end.token_id is None and end.finish_reason is FinishReason.ERROR
        assert end.error_code == "numeric" and cids["scores"] in (end.error or "")


def test_adapters_that_certainly_overflow_are_refused(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    engine = make_engine(model, tmp_path / "model", loads=InlineExecutor())
    folder = make_peft_adapter(tmp_path / "huge", model)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e18 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(AdapterRefused, match=r"overflow .*float32") as refused:
        engine.register_adapter(folder)
    assert refused.value.code == "overflow"


@pytest.mark.parametrize("in_features", [TILE_DEPTH, TILE_DEPTH + 8])
def test_packed_bfloat16_weights_have_whole_tiles(in_features: int) -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no bfloat16 GEMM on this CPU")
    weight = torch.randn(9, in_features).to(torch.bfloat16)
    x = torch.randn(3, in_features).to(torch.bfloat16)
    linear = PackedLinear(Linear.over(weight, None))
    assert (in_features + linear.padding) % TILE_DEPTH == 0
    torch.testing.assert_close(linear(x), x @ weight.T, atol=0.1, rtol=0.05)
    x[2] = torch.nan
    assert linear(x)[:2].isfinite().all() and linear(x)[2].isnan().all()


def test_pages_that_a_sequence_has_not_begun_are_never_read() -> None:
    layout = PagedLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
    storage = torch.full((8, 2 * 2 * 4), torch.nan)
    # The first holds three pages and fills one; the second is longer.
    sequences = [SequenceRows(0, 1, 1, [0, 1, 2]), SequenceRows(1, 1, 5, [3, 4, 5])]
    storage[[0, 3, 4, 5]] = 1.0
    plan = cpu_attention.plan(sequences, layout, torch.device("cpu"))
    out = plan.attend(storage, torch.ones(2, 1, 4), AttendArgs(layer=0, scale=1.0))
    assert torch.equal(out, torch.ones(2, 4))
