"""Compares plans with actual allocations, for the shapes of real and of random models."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loramux.adapters.packed.dense import IMAGE_HEADER_BYTES
from loramux.adapters.packed.file import write_image
from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.packed.packing import PagedPacking
from loramux.adapters.peft.reader import read_adapter
from loramux.capacity.plan import Budgets, Fleet, MemoryPlan, PlannedBase, parse_targets
from loramux.capacity.planner import (
    ideal_hit_rate,
    lru_hit_rate,
    num_kept,
    plan_memory,
    zipf_shares,
)
from loramux.engine.stats import tier_stats
from loramux.errors import InvalidRequest
from loramux.memory.pool import PagePool
from loramux.models.architectures import DecoderConfig, base_info, parse_config
from loramux.types.kv import KVLayout
from loramux.types.model import BaseModelInfo, PackingKind
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.linear_specs import specs_of
from tests.model_factory import MODEL_CLASSES, tiny_config, tiny_transformers_model
from tests.packing_factory import pack_dense, pack_image

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*QKVO, "gate_proj", "up_proj", "down_proj")
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def planned(
    config: dict[str, Any], dtype: str = "float32", packing: PackingKind = "dense"
) -> PlannedBase:
    shapes = base_info(parse_config(config), "base")
    return PlannedBase(name="base", shapes=shapes, dtype=dtype, packing=packing)


def plan(base: PlannedBase, fleet: dict[str, Any] | None = None, **budgets: Any) -> MemoryPlan:
    settings: dict[str, Any] = {"num_adapters": 100, "ranks": (8,), "targets": QKVO}
    sizes = {"device_bytes": 2**30, "host_bytes": 2**30, **budgets}
    return plan_memory(base, Fleet(**{**settings, **(fleet or {})}), Budgets(**sizes))


def shape_of(family: str) -> tuple[Any, dict[str, Any]]:
    if family == "smollm2-135m":
        import transformers

        config = transformers.LlamaConfig(**{k: v for k, v in SMOLLM2.items() if k[0] != "a"})
    else:
        config = tiny_config(family)
    name = MODEL_CLASSES[type(config).__name__]
    return config, {**config.to_dict(), "architectures": [name]}


def pool_for(config: DecoderConfig, num_pages: int) -> PagePool:
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_tokens=16)
    return PagePool(num_pages, layout.page_bytes, torch.device("cpu"))


@pytest.mark.parametrize("family", ["smollm2-135m", "qwen2", "gemma2"])
@pytest.mark.parametrize("targets", [QKVO, ALL], ids=["qkvo", "all"])
def test_bytes_and_pages_are_those_of_a_packed_adapter(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    config, as_json = shape_of(family)
    decoder_config = parse_config(as_json)
    base = base_info(decoder_config, "tiny-llama")
    folder = write_adapter(
        tmp_path / "a",
        lora_config_dict(r=16, target_modules=list(targets)),
        lora_tensors(config, r=16, names=targets),
    )
    image = pack_dense(read_adapter(folder, base), base.linears, torch.float32)
    told = planned(as_json)
    [size] = plan(told, {"ranks": (16,), "targets": targets}).sizes
    assert size.bytes == pytest.approx(image.num_bytes, rel=0.01)
    write_image(tmp_path / "image", image)
    assert size.disk_bytes == pytest.approx((tmp_path / "image").stat().st_size, rel=0.01)

    pool = pool_for(decoder_config, size.pages)
    assert pool.page_bytes == told.page_bytes
    pages = pool.view(torch.float32)
    assert size.pages == pages.pages_for(image.layout.num_elements)
    pool.write(list(range(size.pages)), image.buffer)
    assert torch.equal(pages.storage.flatten()[: image.buffer.numel()], image.buffer)
    assert pool.num_bytes == size.device_bytes


@pytest.mark.parametrize("family", ["smollm2-135m", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_bytes_are_those_of_an_adapter_in_rank_blocks(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    config, as_json = shape_of(family)
    base = base_info(parse_config(as_json), "tiny-llama")
    folder = write_adapter(
        tmp_path,
        lora_config_dict(r=20, target_modules=list(ALL)),
        lora_tensors(config, r=20, names=ALL),
    )
    told = planned(as_json, str(dtype).removeprefix("torch."), packing="paged")
    packing = PagedPacking(base.linears, dtype, told.page_bytes, mapped_buffer)
    image = pack_image(read_adapter(folder, base), packing)
    [size] = plan(told, {"ranks": (20,), "targets": ALL}).sizes
    assert (size.bytes, size.device_bytes) == (image.num_bytes, image.num_bytes)


def test_fp12_saves_space_on_a_gpu_and_high_ranks_are_bounded() -> None:
    base = planned(LLAMA_8B, "bfloat16", packing="paged")
    sizes = {size.rank: size for size in plan(base, {"ranks": (16, 256, 1000)}).sizes}
    assert sizes[16].bytes < 26 * 2**20
    assert 3.9 * sizes[256].pages < sizes[1000].pages <= 4 * sizes[256].pages


@pytest.mark.parametrize("family", ["llama31", "gemma2"])
def test_a_running_engine_uses_the_planned_bytes(tmp_path: Path, family: str) -> None:
    model = tiny_transformers_model(family)
    engine = make_engine(model, tmp_path / "model", reference_kernels=True)
    cids = []
    for seed, rank in enumerate((4, 16, 4)):
        folder = write_adapter(
            tmp_path / f"adapter-{seed}",
            lora_config_dict(r=rank, target_modules=list(QKVO)),
            lora_tensors(model.config, seed=seed, r=rank, names=QKVO),
        )
        cids.append(engine.register_adapter(folder).cid)
    prompt = make_prompt(5, seed=1)
    run_all(engine, [make_request(cid, prompt, ((cid, 1.0),)) for cid in cids])
    told = plan(planned(shape_of(family)[1]), {"num_adapters": 3, "ranks": (4, 16)})
    for tier in tier_stats(engine):
        if tier.tier != "disk":
            assert tier.num_adapters == 3
            assert tier.used_bytes == pytest.approx(told.tier(tier.tier).used_bytes, rel=0.01)
    engine.close()


def test_llama_8b_at_rank_16_is_26_mib_because_grouped_queries_are_counted() -> None:
    told = plan(planned(LLAMA_8B, "bfloat16"), {"ranks": (16,)})
    [size] = told.sizes
    assert (size.bytes, told.base.kv_token_bytes) == (26 * 2**20, 128 * 2**10)
    assert told.base.weight_bytes == 2 * 8_030_261_248


def test_ranks_are_assigned_in_turn() -> None:
    told = plan(planned(SMOLLM2), {"num_adapters": 10, "ranks": (8, 16, 32, 64)})
    assert [(size.rank, size.count) for size in told.sizes] == [(8, 3), (16, 3), (32, 2), (64, 2)]
    total = sum(size.count * size.bytes for size in told.sizes)
    assert told.tier("host").needed_bytes == total


def test_hit_rates_of_a_tier_exclude_faster_tiers() -> None:
    base = planned(LLAMA_8B, "bfloat16")
    told = plan(
        base,
        {"num_adapters": 300, "ranks": (16,)},
        device_bytes=100 * 26 * 2**20 + 1024 * base.kv_token_bytes,
        host_bytes=150 * 26 * 2**20,
        disk_bytes=200 * (26 * 2**20 + IMAGE_HEADER_BYTES),
        kv_tokens=1024,
    )
    assert [tier.adapters for tier in told.tiers] == [100, 150, 200, 300]
    assert [round(tier.uniform.ideal, 4) for tier in told.tiers] == [0.3333, 0.1667, 0.1667, 0.3333]
    for kind in ("zipf", "uniform"):
        for policy in ("ideal", "lru"):
            rates = [getattr(getattr(tier, kind), policy) for tier in told.tiers]
            assert sum(rates) == pytest.approx(1, abs=1e-5) and min(rates) > 0
    assert told.evicted.adapters == 200
    assert told.evicted.uniform_share == pytest.approx(2 / 3, abs=1e-5)
    assert told.kv_tokens_left == 1024


def test_adapters_that_fit_leave_the_rest_to_the_kv_cache() -> None:
    base = planned(SMOLLM2)
    told = plan(base, {"num_adapters": 4})
    [size] = told.sizes
    assert told.evicted.adapters == 0 and told.tier("device").zipf.ideal == 1
    pages = 2**30 // base.page_bytes - 4 * size.pages
    assert told.kv_tokens_left == pages * 16


def test_the_fraction_limits_the_adapters_part_of_the_pool() -> None:
    base = planned(SMOLLM2)
    half = plan(base, {"num_adapters": 5000}, adapter_fraction=0.5).tier("device")
    assert half.used_bytes <= 2**29 < half.used_bytes + plan(base).sizes[0].device_bytes


def test_a_pool_smaller_than_a_page_holds_nothing() -> None:
    shapes = BaseModelInfo(
        name="base",
        architecture="LlamaForCausalLM",
        num_layers=1,
        linears=specs_of(dict.fromkeys(QKVO, (4, 4))),
        num_kv_heads=1,
        head_dim=4,
        vocab_size=512,
        num_parameters=16,
    )
    base = PlannedBase(name="b", shapes=shapes, dtype="float32")
    told = plan(base, device_bytes=base.page_bytes - 1)
    assert told.tier("device").adapters == 0 and told.kv_tokens_left == 0
    with pytest.raises(InvalidRequest, match="has no target 'gate_proj'"):
        parse_targets(ALL, shapes)


def simulated_lru(shares: np.ndarray, sizes: np.ndarray, capacity: float) -> float:
    """Return the hit rate of a simulated LRU cache after its warm-up."""
    cache: OrderedDict[int, None] = OrderedDict()
    used, num_hits, num_warm = 0.0, 0, 4000
    asked = np.random.default_rng(7).choice(len(shares), size=24_000, p=shares)
    for step, item in enumerate(asked.tolist()):
        is_hit = item in cache
        num_hits += is_hit and step >= num_warm
        if not is_hit:
            used += sizes[item]
        cache[item] = None
        cache.move_to_end(item)
        while used > capacity:
            oldest, _ = cache.popitem(last=False)
            used -= sizes[oldest]
    return num_hits / (len(asked) - num_warm)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_approximation_agrees_with_a_simulated_cache(exponent: float) -> None:
    shares, sizes = zipf_shares(120, exponent), np.ones(120)
    assert lru_hit_rate(shares, sizes, 30) == pytest.approx(
        simulated_lru(shares, sizes, 30), abs=0.015
    )


def test_approximation_counts_true_sizes() -> None:
    """The capacity is in bytes, not in adapters."""
    shares, sizes = zipf_shares(200, 1.0), np.resize([8.0, 16.0, 32.0, 64.0], 200)
    expected = simulated_lru(shares, sizes, 1500)
    assert lru_hit_rate(shares, sizes, 1500) == pytest.approx(expected, abs=0.02)


def test_shares_fall_off_by_their_exponent() -> None:
    shares = zipf_shares(10, 2.0)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[3] == pytest.approx(16)
    assert set(zipf_shares(4, 0.0)) == {0.25}


@given(
    num=st.integers(1, 400),
    exponent=st.floats(0, 10),
    ranks=st.lists(st.integers(1, 512), min_size=1, max_size=5),
    room=st.floats(0, 1.2),
)
def test_rates_stay_between_none_and_all(
    num: int, exponent: float, ranks: list[int], room: float
) -> None:
    shares, sizes = zipf_shares(num, exponent), np.resize(np.array(ranks, dtype=float), num)
    capacity = room * float(sizes.sum())
    kept = num_kept(sizes, capacity)
    ideal, lru = ideal_hit_rate(shares, sizes, capacity), lru_hit_rate(shares, sizes, capacity)
    assert sizes[:kept].sum() <= capacity or kept == 0
    assert 0 <= lru <= 1 + 1e-9 and 0 <= ideal <= 1 + 1e-9
    if kept == num:
        assert lru == 1
    if len(set(ranks)) == 1:
        assert lru <= ideal + 1e-6
