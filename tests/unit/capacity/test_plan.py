from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loramux.capacity.plan import (
    Budgets,
    EvictedNow,
    Fleet,
    MemoryPlan,
    PlannedBase,
    parse_dtype,
    parse_targets,
)
from loramux.capacity.planner import plan_memory
from loramux.errors import InvalidRequest
from loramux.types.model import BaseModelInfo
from tests.linear_specs import specs_of

SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=2,
    linears=specs_of({f"{name}_proj": (64, 64) for name in "qkvo"}),
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    num_parameters=1000,
)


def test_a_plan_survives_its_json() -> None:
    """A client must be able to decode every field."""
    base = PlannedBase(name="base", shapes=SHAPES, dtype="float32")
    fleet = Fleet(num_adapters=9, ranks=(4, 8), targets=("q_proj",))
    plan = plan_memory(base, fleet, Budgets(device_bytes=2**20))
    assert b"evicted_now" not in msgspec.json.encode(plan)
    now = EvictedNow(adapters=1, names=["a"], is_enough=True)
    for one in (plan, msgspec.structs.replace(plan, evicted_now=now)):
        assert msgspec.json.decode(msgspec.json.encode(one), type=MemoryPlan) == one
    assert plan.tier("host") is plan.tiers[1]


def test_names_of_targets() -> None:
    shapes = {f"{name}_proj": (64, 64) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    base = replace(SHAPES, linears=specs_of(shapes))
    assert parse_targets(["v", "q_proj"], base) == ("q_proj", "v_proj")
    every = parse_targets(["all-linear"], base)
    assert every == parse_targets(["attention", "mlp"], base) == tuple(shapes)
    fused = replace(SHAPES, linears=specs_of({"qkv_proj": (64, 192), "o_proj": (64, 64)}))
    assert parse_targets(["attention"], fused) == ("qkv_proj", "o_proj")
    with pytest.raises(InvalidRequest, match="Did you mean q_proj"):
        parse_targets(["q_prj"], base)
    with pytest.raises(InvalidRequest, match="targets must be"):
        parse_targets([], base)
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    ("fleet", "budgets", "param"),
    [
        ({"num_adapters": 0}, {}, "adapters"),
        ({"num_adapters": 10**9}, {}, "adapters"),
        ({"ranks": ()}, {}, "rank"),
        ({"ranks": (8, 0)}, {}, "rank"),
        ({"zipf": -1.0}, {}, "zipf"),
        ({"zipf": float("nan")}, {}, "zipf"),
        ({}, {"device_bytes": -1}, "device_memory"),
        ({}, {"host_bytes": 2**80}, "host_memory"),
        ({}, {"adapter_fraction": 0.0}, "adapter_memory_fraction"),
    ],
)
def test_invalid_plans_are_refused_by_parameter(
    fleet: dict[str, Any], budgets: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Fleet(**{"num_adapters": 3, "ranks": (8,), "targets": ("q_proj",), **fleet})
        Budgets(**{"device_bytes": 1, **budgets})
    assert caught.value.param == param
