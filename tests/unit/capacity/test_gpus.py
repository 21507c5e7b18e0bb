"""Plans for GPUs: the table, the estimated pool, and plan against engine in the layout of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.capacity.gpus import (
    GPU_GIB,
    GpuSettings,
    augmented_bytes,
    gpu_total_bytes,
    plan_gpu_memory,
    working_bytes,
)
from loramux.capacity.plan import Budgets, Fleet, PlannedBase, parse_targets
from loramux.capacity.planner import plan_memory
from loramux.errors import InvalidRequest
from loramux.models.architectures import base_info, parse_config

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
SETTINGS = GpuSettings(
    max_batch_tokens=2048, max_sequences=256, augmented_ranks=256, utilization=0.9
)


def planned(packing: Any = "paged") -> PlannedBase:
    shapes = base_info(parse_config(LLAMA_8B), "llama")
    return PlannedBase(name="llama", shapes=shapes, dtype="bfloat16", packing=packing)


def test_every_gpu_of_the_table_has_less_than_its_name_says() -> None:
    sizes = {"a100-40": 40, "a100-80": 80, "h100-nvl": 94, "h200": 141, "b200": 192, "l4": 24}
    for name, nominal in sizes.items():
        assert 0.9 * nominal * 2**30 < gpu_total_bytes(name) < nominal * 2**30
    assert gpu_total_bytes("NVIDIA-H200") == gpu_total_bytes("h200")
    with pytest.raises(InvalidRequest, match="a100-80 or a100-40.*--device-total"):
        gpu_total_bytes("a100")
    assert all(gpu_total_bytes(name) > 2**34 for name in GPU_GIB)


def test_the_pool_is_what_an_8b_model_leaves_of_an_h200() -> None:
    base = planned()
    made = plan_gpu_memory("h200", gpu_total_bytes("h200"), base, SETTINGS)
    # 16 rank blocks of 16 rows for each of the projections.
    assert augmented_bytes(base, 256) == 256 * (6 * 4096 + 14_336) * 32 * 2
    assert made.weight_bytes == 8_030_261_248 * 2
    assert 100 * 2**30 < made.pool_bytes < 112 * 2**30
    larger = GpuSettings(
        max_batch_tokens=8192, max_sequences=256, augmented_ranks=0, utilization=0.9
    )
    assert working_bytes(base, larger) > working_bytes(base, SETTINGS)
    with pytest.raises(InvalidRequest, match="together more than 90% of"):
        plan_gpu_memory("small", 2**34, base, SETTINGS)


def test_the_adapter_tables_of_a_gpu_limit_how_many_fit() -> None:
    def num_on_device(targets: str, rank: int, pool_bytes: int, packing: Any = "paged") -> int:
        base = planned(packing)
        names = parse_targets([targets], base.shapes)
        fleet = Fleet(num_adapters=100_000, ranks=(rank,), targets=names)
        budgets = Budgets(device_bytes=pool_bytes, kv_tokens=0)
        return plan_memory(base, fleet, budgets).tier("device").adapters

    assert num_on_device("q", 8, 2**40) == 8192
    assert num_on_device("q", 8, 2**40, "dense") == 100_000
    # A layer has room for 16 rank blocks per adapter, and these take 28.
    assert num_on_device("all", 64, 2**44) == 8192 * 16 // 28
    assert num_on_device("all", 64, 2**33) == 4096 // 142


def test_plan_and_engine_agree_in_the_layout_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="no Triton on this machine")
    from tests.gpu import plan_check

    monkeypatch.setenv("LORAMUX_KERNELS", "triton")
    engine, config = plan_check.make_engine(
        TINY, "cpu", dtype="bfloat16", device_memory_bytes=2**20, max_sequences=2
    )
    assert plan_check.check(engine, config) == 0, capsys.readouterr().out
    monkeypatch.setattr(plan_check, "num_loaded", lambda engine, kind: -1)
    assert plan_check.check(engine, config, plan_check.KINDS[:1]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    engine.close()
