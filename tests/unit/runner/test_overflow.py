"""Adapters whose values overflow: they end with an error, and change no row beside theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.engine.engine import Engine
from loramux.errors import AdapterRefused
from loramux.kernels.cpu import attention as cpu_attention
from loramux.kernels.linear import TILE_DEPTH
from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.models.layers import Linear
from loramux.models.packed_linear import PackedLinear, can_pack
from loramux.types.kv import KVLayout
from loramux.types.request import FinishReason, TokenEvent
from loramux.types.step import StepPlan
from tests.adapter_factory import make_peft_adapter
from tests.chunk_factory import make_chunk
from tests.device_factory import device_engine, lease, row
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.memory_factory import InlineExecutor
from tests.model_factory import tiny_transformers_model

# Values of LORAMUX_KERNELS.
KERNELS = ("torch", "cpu", "")
# numba's kernels are for float32 alone.
SETS = [(kernels, "float32") for kernels in KERNELS]
SETS += [(kernels, dtype) for dtype in ("bfloat16", "float16") for kernels in ("torch", "cpu")]
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
FLOAT16 = (1e-6, 6e4)
"""A denormal number of float16, and the largest one that is not refused."""


def scaled_adapter(folder: Path, model: Any, name: str, dtype: str = "float32") -> Path:
    a, b, places = WEIGHTS[name]
    if dtype == "float16":
        a, b = max(a, FLOAT16[0]), min(b, FLOAT16[1])
    # One rank: another order of the sum could not hide an overflow.
    made = make_peft_adapter(folder, model, r=1, lora_alpha=1, target_modules=list(places))
    file = made / "adapter_model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        tensors[key] = tensor / tensor.abs().max() * (a if ".lora_A." in key else b)
    save_file(tensors, file)
    return made


def engine_with(
    tmp_path: Path, size: str, kernels: str, patch: pytest.MonkeyPatch, dtype: str = "float32"
) -> tuple[Engine, dict[str, str]]:
    model = tiny_transformers_model("llama", num_hidden_layers=2, **SIZES[size])
    with patch.context() as scoped:
        scoped.setenv("LORAMUX_KERNELS", kernels)
        engine = make_engine(model, tmp_path / "model", loads=InlineExecutor(), dtype=dtype)
    folders = {name: scaled_adapter(tmp_path / name, model, name, dtype) for name in WEIGHTS}
    good = make_peft_adapter(tmp_path / "good", model, seed=9, r=4)
    cids = {name: engine.register_adapter(folder).cid for name, folder in folders.items()}
    return engine, cids | {"good": engine.register_adapter(good).cid}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kernels", "dtype"), SETS)
def test_an_adapter_that_overflows_changes_no_bit_of_other_rows_and_gets_no_token(
    size: str, kernels: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cids = engine_with(tmp_path, size, kernels, monkeypatch, dtype)
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
                make_chunk(
                    i, make_prompt(n, seed=i), 0, [last - i, last - i - 8], selections[i], row()
                )
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
        broken = {n for n, rows in logits.items() if not rows[-1].amax().isfinite()}
        assert broken <= result.failed.keys(), name
        overflows = WEIGHTS[name][1] > 1e9
        if dtype == "float16":
            # Its largest weights overflow in some rows only.
            assert result.failed.keys() <= ({1, 3} if overflows else set()), name
        else:
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


class InnerSizes(TorchDispatchMode):
    """Records the inner sizes of GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"):
            self.found.add(args[name == "aten::addmm"].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [TILE_DEPTH, TILE_DEPTH + 8])
def test_linears_of_16_bits_have_whole_tiles_on_a_cpu(
    in_features: int, dtype: torch.dtype, is_packed: bool
) -> None:
    if is_packed and not can_pack(dtype, torch.device("cpu")):
        pytest.skip("no GEMM of 16 bits on this CPU")
    weight = torch.randn(9, in_features).to(dtype)
    linear = Linear.over(weight, None)
    multiply = PackedLinear(linear) if is_packed else linear
    for num_rows in (1, 3):
        x = torch.randn(num_rows, in_features).to(dtype)
        with InnerSizes() as sizes:
            y = multiply(x)
        assert sizes.found == {-(-in_features // TILE_DEPTH) * TILE_DEPTH}
        torch.testing.assert_close(y, x @ weight.T, atol=0.1, rtol=0.05)
    x[2] = torch.nan
    y = multiply(x)
    assert y[:2].isfinite().all() and y[2].isnan().all()


class PartsOfTiles(TorchDispatchMode):
    """Counts GEMMs whose rows have NaN and whose inner size is no multiple of a tile's depth."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"):
            x = args[name == "aten::addmm"]
            if x.itemsize == 2 and x.shape[-1] % TILE_DEPTH and not x.isfinite().all():
                self.found.append(f"{name} {tuple(x.shape)}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
@pytest.mark.parametrize("size", SIZES)
def test_no_gemm_of_16_bits_reads_past_a_row_with_nan(
    size: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX, the row before it would be NaN as well; other CPUs have the same calls."""
    engine, cids = engine_with(tmp_path, size, kernels, monkeypatch, "bfloat16")
    prompt = make_prompt(20, seed=1)
    for name in ("good", "hidden states", "good", "everything", "harmless"):
        number = len(engine.scheduler.claims())
        adapter = ((cids[name], 1.0),)
        engine.add(make_request(f"{name} {number}", prompt, adapter, max_tokens=3))
        with PartsOfTiles() as parts:
            engine.step()
        assert parts.found == []


def test_pages_that_a_sequence_has_not_begun_are_never_read() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
    storage = torch.full((8, 2 * 2 * 4), torch.nan)
    # The first holds three pages and fills one; the second is longer.
    sequences = [SequenceRows(0, 1, 1, [0, 1, 2]), SequenceRows(1, 1, 5, [3, 4, 5])]
    storage[[0, 3, 4, 5]] = 1.0
    plan = cpu_attention.plan(sequences, layout, torch.device("cpu"))
    out = plan.attend(storage, torch.ones(2, 1, 4), AttendArgs(layer=0, scale=1.0))
    assert torch.equal(out, torch.ones(2, 4))


def device_engine_with(
    tmp_path: Path, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Engine, dict[str, str]]:
    pytest.importorskip("triton", reason="no Triton on this machine")
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine, _ = device_engine(patch, model, tmp_path / "model", max_sequences=6, **settings)
    bad = scaled_adapter(tmp_path / "bad", model, "hidden states")
    good = make_peft_adapter(tmp_path / "good", model, seed=9, r=4)
    return engine, {
        "bad": engine.register_adapter(bad).cid,
        "good": engine.register_adapter(good).cid,
    }


def events_of(engine: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    # Triton's interpreter computes with numpy, which warns.
    with np.errstate(over="ignore", invalid="ignore"):
        while engine.has_work:
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
            engine.check_integrity()
    return events


def test_on_a_gpu_requests_that_overflow_end_with_an_error_and_change_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cids = device_engine_with(tmp_path, monkeypatch)
    prompt, good, bad = make_prompt(20, seed=1), ((cids["good"], 1.0),), ((cids["bad"], 1.0),)
    for name in ("alone", "beside"):
        engine.add(make_request(name, prompt, good, max_tokens=4))
        if name == "beside":
            engine.add(make_request("kernel", prompt, bad, max_tokens=4, temperature=0.9))
            engine.add(make_request("sampler", prompt, bad, max_tokens=4, top_k=3, temperature=1.0))
            engine.add(make_request("asks", prompt, bad, max_tokens=0, prompt_logprobs=0))
        events = events_of(engine)
        tokens = [event.token_id for event in events.pop(name)]
        if name == "alone":
            expected = tokens
    assert tokens == expected and len(tokens) == 4
    assert sorted(events) == ["asks", "kernel", "sampler"]
    for (end,) in events.values():
        assert end.token_id is None and end.finish_reason is FinishReason.ERROR
        assert end.error_code == "numeric" and cids["bad"] in (end.error or "")


def test_steps_launched_ahead_of_a_failure_give_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cids = device_engine_with(tmp_path, monkeypatch, prefix_cache=False)
    for name in ("bad", "good"):
        engine.add(make_request(name, make_prompt(9, seed=1), ((cids["good"], 1.0),), max_tokens=8))
    events: dict[str, list[TokenEvent]] = {"bad": [], "good": []}
    for _ in range(4):
        for event in engine.step():
            events[event.request_id].append(event)
    # From now on the keys of one sequence are NaN.
    pages = next(iter(engine.scheduler.claims().values()))
    engine.executor.kv_pages[pages] = torch.nan
    for name, more in events_of(engine).items():
        events[name] += more
    *_, end = events["bad"]
    assert len(events["bad"]) < 8 and end.error_code == "numeric" and end.token_id is None
    assert all(event.error is None for event in events["bad"][:-1])
    assert len(events["good"]) == 8 and all(event.error is None for event in events["good"])
