from __future__ import annotations

import msgspec

from loramux.capacity.plan import Budgets, EvictedNow, Fleet, MemoryPlan, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.types.model import BaseModelInfo, Projection

SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=2,
    projections=tuple(Projection(f"{name}_proj", 64, 64) for name in "qkvo"),
    num_kv_heads=2,
    head_dim=32,
    num_parameters=1000,
)


def test_a_plan_survives_its_json() -> None:
    """Catches a field that a client could not read back."""
    base = PlannedBase(name="base", shapes=SHAPES, dtype="float32")
    fleet = Fleet(num_adapters=9, ranks=(4, 8), targets=("q_proj",))
    plan = plan_memory(base, fleet, Budgets(device_bytes=2**20))
    assert b"evicted_now" not in msgspec.json.encode(plan)
    now = EvictedNow(adapters=1, names=["a"], is_enough=True)
    for one in (plan, msgspec.structs.replace(plan, evicted_now=now)):
        assert msgspec.json.decode(msgspec.json.encode(one), type=MemoryPlan) == one
    assert plan.tier("host") is plan.tiers[1]
