"""How a memory plan looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.doctor_view import say, size_text

if TYPE_CHECKING:
    from loramux.capacity.plan import AdapterSize, MemoryPlan, TierPlan


def show_plan(plan: MemoryPlan, console: Console) -> None:
    for name, value in facts(plan):
        say(console, f"{name:<9}", value, style="bold")
    console.print(size_table(plan.sizes))
    console.print(tier_table(plan))
    say(console, "KV cache ", kv_text(plan), style="bold")
    if plan.evicted.adapters:
        say(console, "Evicted  ", evicted_text(plan), style="bold")
    for sentence in plan.advice:
        is_good = plan.evicted.adapters == 0
        say(console, "→ ", sentence, style="bold green" if is_good else "bold yellow")


def facts(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    base = plan.base
    yield "Base", f"{base.name}, {base.num_layers} layers, {base.dtype}"
    yield "Weights", f"{size_text(base.weight_bytes)}, besides the pool"
    pages = f"{size_text(base.page_bytes)} each, {base.block_tokens} tokens of KV cache"
    yield "Pages", f"{pages} ({size_text(base.kv_token_bytes)} a token)"
    yield "Adapters", f"{plan.adapters} on {', '.join(plan.targets)}"


def size_table(sizes: list[AdapterSize]) -> Table:
    table = Table()
    for column in ("rank", "adapters", "bytes", "pages", "on the device"):
        table.add_column(column, justify="right")
    for size in sizes:
        table.add_row(
            str(size.rank),
            str(size.count),
            size_text(size.bytes),
            str(size.pages),
            size_text(size.device_bytes),
        )
    return table


def tier_table(plan: MemoryPlan) -> Table:
    table = Table("tier", title="where requests find their adapter", title_justify="left")
    columns = ("budget", "adapters", "they take")
    for column in (*columns, f"Zipf {plan.zipf:g}", "with LRU", "uniform", "with LRU"):
        table.add_column(column, justify="right")
    for tier in plan.tiers:
        table.add_row(Text(tier.tier), *tier_cells(tier))
    return table


def tier_cells(tier: TierPlan) -> Iterator[str]:
    yield "" if tier.budget_bytes is None else size_text(tier.budget_bytes)
    yield str(tier.adapters)
    yield size_text(tier.used_bytes)
    for rate in (tier.zipf.ideal, tier.zipf.lru, tier.uniform.ideal, tier.uniform.lru):
        yield f"{rate:.1%}"


def kv_text(plan: MemoryPlan) -> str:
    kept = plan.kv_tokens_reserved
    return f"{plan.kv_tokens_left} tokens beside these adapters; {kept} were kept free"


def evicted_text(plan: MemoryPlan) -> str:
    evicted = plan.evicted
    return (
        f"the {evicted.adapters} least popular adapters are not on the device: "
        f"{evicted.zipf_share:.1%} of the requests by Zipf {plan.zipf:g}, "
        f"{evicted.uniform_share:.1%} if all are equal"
    )
