"""Tests that the advised values have the promised effect."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.capacity.advice import flag_size
from loramux.capacity.plan import Budgets, Fleet, MemoryPlan, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.config.fields import parse_bytes
from loramux.types.model import BaseModelInfo
from tests.linear_specs import specs_of

SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=4,
    linears=specs_of({f"{name}_proj": (640, 640) for name in "qkvo"}),
    num_kv_heads=4,
    head_dim=64,
    vocab_size=512,
    num_parameters=10**6,
)
BASE = PlannedBase(name="base", shapes=SHAPES, dtype="bfloat16")
FLAG = re.compile(r"[Rr]aise (--[\w-]+) to ([\w.]+)")
TARGETS = ("q_proj",)


def flags_in(plan: MemoryPlan) -> dict[str, int]:
    return {name: parse_bytes(size) for name, size in FLAG.findall(" ".join(plan.advice))}


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 900),
    ranks=st.lists(st.sampled_from([1, 8, 16, 100]), min_size=1, max_size=3),
    device=st.integers(0, 2**28),
    fraction=st.sampled_from([0.3, 1.0]),
    kv_tokens=st.sampled_from([None, 0, 5000]),
)
def test_the_memory_that_is_advised_is_enough(
    num: int, ranks: list[int], device: int, fraction: float, kv_tokens: int | None
) -> None:
    fleet = Fleet(num_adapters=num, ranks=tuple(ranks), targets=TARGETS)
    budgets = Budgets(device_bytes=device, kv_tokens=kv_tokens, adapter_fraction=fraction)
    plan = plan_memory(BASE, fleet, budgets)
    if plan.evicted.adapters == 0:
        assert "--device-memory" not in " ".join(plan.advice)
        return
    flags = flags_in(plan)
    raised = replace(budgets, device_bytes=flags["--device-memory"])
    assert plan_memory(BASE, fleet, raised).evicted.adapters == 0
    raised = replace(budgets, host_bytes=flags["--host-memory"])
    assert plan_memory(BASE, fleet, raised).tier("host").adapters == num
    raised = replace(budgets, disk_bytes=flags["--disk-space"])
    assert plan_memory(BASE, fleet, raised).tier("disk").adapters == num


@pytest.mark.parametrize("num", [30, 111, 200])
def test_the_rank_that_is_advised_is_the_largest_that_fits(num: int) -> None:
    budgets = Budgets(device_bytes=2**24, host_bytes=2**30, kv_tokens=64)
    plan = plan_memory(BASE, Fleet(num_adapters=num, ranks=(900,), targets=TARGETS), budgets)
    [found] = re.findall(r"adapters of rank (\d+) or less", " ".join(plan.advice))
    for rank, fits in ((int(found), True), (int(found) + 1, False)):
        fleet = Fleet(num_adapters=num, ranks=(rank,), targets=TARGETS)
        assert (plan_memory(BASE, fleet, budgets).evicted.adapters == 0) is fits


def advice_for(**budgets: int) -> str:
    fleet = Fleet(num_adapters=500, ranks=(64,), targets=TARGETS)
    return " ".join(plan_memory(BASE, fleet, Budgets(**budgets)).advice)


def test_a_tier_no_larger_than_the_faster_one_is_reported_as_useless() -> None:
    pool = {"device_bytes": 2**27, "kv_tokens": 2048}
    assert "host tier has room for" in advice_for(**pool, host_bytes=2**23)
    assert "host tier has room for" not in advice_for(**pool, host_bytes=2**28)
    assert "disk tier has room for" in advice_for(**pool, host_bytes=2**26, disk_bytes=2**23)


def test_an_adapter_larger_than_the_pool_is_reported() -> None:
    assert "it cannot be served" in advice_for(device_bytes=2**18, host_bytes=2**30)
    assert "goes through host memory" in advice_for(device_bytes=2**30, host_bytes=0)


def test_too_few_kv_tokens_and_small_batches_are_reported() -> None:
    text = advice_for(device_bytes=2**22, host_bytes=2**30, kv_tokens=0)
    assert "No batch can mix more than" in text and "tokens of KV cache are left" in text


def test_no_advice_when_all_adapters_fit() -> None:
    fleet = Fleet(num_adapters=3, ranks=(8,), targets=TARGETS)
    plan = plan_memory(BASE, fleet, Budgets(device_bytes=2**30, host_bytes=2**30))
    assert plan.advice == ["All 3 adapters fit on the device: each is loaded once."]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1, "1"), (1024, "1KiB"), (1025, "1.1KiB"), (13_207_024_435, "12.3GiB"), (2**41, "2048GiB")],
)
def test_sizes_are_rounded_up_and_can_be_typed(num_bytes: int, text: str) -> None:
    assert flag_size(num_bytes) == text
    assert parse_bytes(text) >= num_bytes
