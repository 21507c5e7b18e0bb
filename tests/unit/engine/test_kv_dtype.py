"""A KV cache of another dtype than the weights, against PEFT with the same rounding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from loramux.engine.engine import Engine
from loramux.errors import InvalidRequest
from loramux.types.request import Selection
from loramux.types.step import Chunk, StepPlan
from tests.device_factory import lease, two_adapters
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.memory_factory import Clock, InlineExecutor
from tests.model_factory import tiny_transformers_model

# LORAMUX_KERNELS; numba where it is unset.
PATHS = ["numba", "cpu", "torch", "triton"]
TOKENS = make_prompt(40, seed=4)
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3}
"""What a key that is rounded the other way may do to the logits."""


class RoundedCache(DynamicCache):
    """Keeps keys and values, after the rotary embedding, as a dtype holds them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, keys: Tensor, values: Tensor, *others: Any, **options: Any) -> Any:
        rounded = (x.to(self._dtype).to(x.dtype) for x in (keys, values))
        return super().update(*rounded, *others, **options)


def oracle(model: Any, folder: Path | None, dtype: torch.dtype) -> Tensor:
    """Return the logits of all tokens, of the base or of an adapter."""
    from peft import PeftModel

    target = model if folder is None else PeftModel.from_pretrained(copy.deepcopy(model), folder)
    with torch.inference_mode():
        cache = RoundedCache(dtype)
        found = target.eval()(torch.tensor([TOKENS]), past_key_values=cache, use_cache=True)
    logits: Tensor = found.logits[0]
    return logits


def engine_of(
    path: str, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Engine:
    if path == "triton":
        pytest.importorskip("triton", reason="no Triton on this machine")
        settings = {"max_sequences": 4, "max_batch_tokens": 64, **settings}
    if path != "numba":
        monkeypatch.setenv("LORAMUX_KERNELS", path)
    return make_engine(model, folder, loads=InlineExecutor(), clock=Clock(), **settings)


def logits_in_chunks(engine: Engine, selections: list[Selection]) -> list[Tensor]:
    """Return the logits of every selection: two prefill chunks and three decodes."""
    last = engine.pages.num_pages - 1
    pages = [[last - 3 * i - j for j in range(3)] for i in range(len(selections))]
    found: list[list[Tensor]] = [[] for _ in selections]
    for cut in (slice(0, 21), slice(21, 37), slice(37, 38), slice(38, 39), slice(39, 40)):
        chunks = [
            Chunk(i, TOKENS[cut], cut.start, pages[i], selection)
            for i, selection in enumerate(selections)
        ]
        logits = engine.executor.logits(StepPlan(tuple(chunks)))
        for i, parts in enumerate(found):
            parts.append(logits[i].float())
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
def test_logits_are_those_of_peft_with_a_rounded_cache(
    path: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    engine = engine_of(path, model, tmp_path / "model", monkeypatch, kv_cache_dtype=kv_dtype)
    assert engine.executor.dtype == torch.float32 and engine.executor.kv.dtype == kv_dtype
    cids = [engine.register_adapter(folder).cid for folder in folders]
    selections: list[Selection] = [(), *[((cid, 1.0),) for cid in cids]]
    lease(engine, *selections)
    found = logits_in_chunks(engine, selections)
    for folder, logits in zip([None, *folders], found, strict=True):
        expected = oracle(model, folder, getattr(torch, kv_dtype))
        # A key next to the middle between two numbers may be rounded the other way.
        difference = (logits - expected).abs()
        assert (difference < 1e-4).float().mean() > 0.99
        assert difference.max() < ROUNDING[kv_dtype]
    exact = oracle(model, None, torch.float32)
    assert kv_dtype == "float16" or (found[0] - exact).abs().max() > 1e-3, "the cache is rounded"
    engine.close()


@pytest.mark.parametrize("path", ["cpu", "torch", "triton"])
@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_a_base_in_bfloat16(
    kv_dtype: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wider cache than the weights loses nothing: the logits are as near as those of bfloat16."""
    model = tiny_transformers_model("llama")
    errors = []
    for cache in (kv_dtype, "bfloat16"):
        settings = {"dtype": "bfloat16", "kv_cache_dtype": cache}
        engine = engine_of(path, model, tmp_path / "model", monkeypatch, **settings)
        assert engine.executor.dtype == torch.bfloat16 and engine.executor.kv.dtype == cache
        [logits] = logits_in_chunks(engine, [()])
        exact = oracle(model.float(), None, torch.float32)
        errors.append(float((logits - exact).norm() / exact.norm()))
        engine.close()
    assert errors[0] < 0.05 and errors[0] < 1.2 * errors[1], errors


@pytest.mark.parametrize("path", ["numba", "triton"])
def test_a_narrow_cache_holds_more_tokens_beside_the_same_adapters(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama")
    folders = two_adapters(model, tmp_path)
    found = {}
    for kv_dtype in ("float32", "float16"):
        engine = engine_of(path, model, tmp_path / "model", monkeypatch, kv_cache_dtype=kv_dtype)
        cards = [engine.register_adapter(folder) for folder in folders]
        lease(engine, *[((card.cid, 1.0),) for card in cards])
        page_bytes = engine.executor.page_bytes
        for card in cards:
            page_ids = engine.residency.resident[card.cid].page_ids
            assert len(page_ids) == -(-card.num_bytes // page_bytes)
        found[kv_dtype] = (page_bytes, engine.pages.num_pages)
        engine.close()
    assert found["float16"] == (found["float32"][0] // 2, 2 * found["float32"][1])


@pytest.mark.parametrize("path", ["numba", "triton"])
def test_a_prefix_hit_changes_no_token(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    engine = engine_of(path, model, tmp_path, monkeypatch, kv_cache_dtype="float16")
    answers = [run_all(engine, [make_request(name, TOKENS)])[name] for name in ("cold", "warm")]
    assert answers[0] == answers[1]
    assert engine.memory.prefixes is not None
    assert engine.memory.prefixes.num_hit_tokens == 32
    engine.close()


def test_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype must be .*float16.*'int3'"):
        make_engine(model, tmp_path, kv_cache_dtype="int3")
