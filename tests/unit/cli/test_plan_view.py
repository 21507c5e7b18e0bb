from __future__ import annotations

import io

from rich.console import Console

from loramux.capacity.plan import Budgets, Fleet, PlannedBase
from loramux.capacity.planner import plan_memory
from loramux.cli.plan import show_plan
from loramux.types.model import BaseModelInfo, Projection

SHAPES = BaseModelInfo(
    name="base",
    architecture="LlamaForCausalLM",
    num_layers=4,
    projections=tuple(Projection(f"{name}_proj", 640, 640) for name in "qkvo"),
    num_kv_heads=4,
    head_dim=64,
    num_parameters=10**6,
)


def shown(num_adapters: int) -> str:
    base = PlannedBase(name="base\x1b[2J", shapes=SHAPES, dtype="bfloat16")
    fleet = Fleet(num_adapters=num_adapters, ranks=(8, 64), targets=("q_proj",))
    budgets = Budgets(device_bytes=2**24, host_bytes=2**25, disk_bytes=2**40, kv_tokens=512)
    console = Console(file=io.StringIO(), width=140)
    show_plan(plan_memory(base, fleet, budgets), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_rank_and_every_tier_has_its_row() -> None:
    text = shown(100)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert [row[1:4] for row in rows[:2]] == [["8", "50", "80 KiB"], ["64", "50", "640 KiB"]]
    assert [row[1] for row in rows[2:]] == ["device", "host", "disk", "source"]
    assert "least popular adapters are not on the device" in text


def test_no_eviction_is_shown_if_all_adapters_fit() -> None:
    text = shown(10)
    assert "least popular" not in text and "All 10 adapters fit" in text


def test_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in shown(10)
