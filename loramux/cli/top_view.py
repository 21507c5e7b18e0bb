"""One frame of `loramux top`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loramux.cli.doctor_view import printable, size_text
from loramux.client.replies import AdapterInfo, EngineInfo, TierInfo

BAR_WIDTH = 30
MAX_NAME_CHARACTERS = 40
TIER_STYLES = {"device": "green", "host": "cyan", "disk": "yellow", "loading": "magenta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    url: str
    engine: EngineInfo
    adapters: tuple[AdapterInfo, ...]
    """The busiest first."""
    taken_s: float
    """On a clock that only goes forward."""
    clock_s: float
    """Seconds since the epoch."""
    last: Frame | None = None

    def without_history(self) -> Self:
        return replace(self, last=None)

    def per_second(self, now: int, before: int) -> float | None:
        """None: nothing to compare with, or the server was started again."""
        if self.last is None or now < before or self.taken_s <= self.last.taken_s:
            return None
        return (now - before) / (self.taken_s - self.last.taken_s)


def frame_view(frame: Frame, fault: str | None = None) -> RenderableType:
    return Group(
        title_line(frame),
        *([Text(f"No answer: {printable(fault)}", "bold red")] if fault else []),
        batch_line(frame),
        pages_line(frame.engine),
        tier_table(frame.engine),
        adapter_table(frame),
    )


def title_line(frame: Frame) -> Text:
    engine = frame.engine
    style = "bold green" if engine.status == "ready" else "bold yellow"
    clock = time.strftime("%H:%M:%S", time.localtime(frame.clock_s))
    return Text.assemble(
        ("loramux top", "bold"),
        f"  {printable(frame.url)}  {printable(engine.model)}  ",
        (printable(engine.status), style),
        f"  {clock}",
        f"  restarts {engine.restarts}" if engine.restarts else "",
        ("  q leaves", "dim"),
    )


def batch_line(frame: Frame) -> Text:
    engine, last = frame.engine, frame.last.engine if frame.last else frame.engine
    tokens = frame.per_second(engine.generation_tokens, last.generation_tokens)
    prompts = frame.per_second(engine.prompt_tokens, last.prompt_tokens)
    requests = frame.per_second(engine.requests, last.requests)
    return Text.assemble(
        ("Batch ", "bold"),
        f"{engine.running} running  ",
        ("Queue ", "bold"),
        f"{engine.waiting} waiting  ",
        ("Tokens ", "bold"),
        f"{rate_text(tokens)} out, {rate_text(prompts)} in  ",
        ("Requests ", "bold"),
        f"{rate_text(requests)}  ",
        ("Prefix cache ", "bold"),
        share_text(engine.prefix_hit_tokens, engine.prefix_query_tokens),
        f"  preempted {engine.preemptions}" if engine.preemptions else "",
    )


def pages_line(engine: EngineInfo) -> Text:
    used = engine.pages - engine.free_pages
    share = used / engine.pages if engine.pages else 0.0
    filled = round(share * BAR_WIDTH)
    size = size_text(engine.pages * engine.page_bytes)
    return Text.assemble(
        ("Pages ", "bold"),
        ("█" * filled, "red" if share > 0.95 else "green"),
        ("░" * (BAR_WIDTH - filled), "dim"),
        f" {share:.0%} of {size} in use",
    )


def tier_table(engine: EngineInfo) -> Table:
    table = Table("tier", title="tiers", title_justify="left")
    columns = ("adapters", "bytes", "budget", "found here", "loads", "each", "evicted", "failed")
    for column in columns:
        table.add_column(column, justify="right")
    num_found = sum(tier.hits for tier in engine.tiers)
    for tier in engine.tiers:
        name = Text(printable(tier.tier), TIER_STYLES.get(tier.tier, ""))
        table.add_row(name, *tier_cells(tier, num_found))
    return table


def tier_cells(tier: TierInfo, num_found: int) -> Iterator[str]:
    yield str(tier.adapters)
    yield size_text(tier.used_bytes)
    yield size_text(tier.budget_bytes) if tier.budget_bytes else ""
    yield share_text(tier.hits, num_found)
    yield str(tier.loads)
    yield f"{tier.load_seconds / tier.loads * 1000:.1f} ms" if tier.loads else ""
    yield str(tier.evictions)
    yield str(tier.failures)


def adapter_table(frame: Frame) -> Table:
    table = Table("adapter", "tier", title="busiest adapters", title_justify="left")
    columns = ("rank", "bytes", "run", "wait", "tokens", "a second", "hits", "misses", "last use")
    for column in columns:
        table.add_column(column, justify="right")
    before = {entry.cid: entry for entry in frame.last.adapters} if frame.last else {}
    for entry in frame.adapters:
        tier = Text(printable(entry.tier), TIER_STYLES.get(entry.tier, ""))
        tier.append(" pinned" if entry.pinned else "", "bold")
        cells = adapter_cells(frame, entry, before.get(entry.cid, entry))
        table.add_row(Text(name_text(entry)), tier, *cells)
    return table


def adapter_cells(frame: Frame, entry: AdapterInfo, before: AdapterInfo) -> Iterator[str]:
    yield str(entry.rank)
    yield size_text(entry.bytes)
    yield str(entry.running)
    yield str(entry.waiting)
    yield str(entry.generation_tokens)
    yield rate_text(frame.per_second(entry.generation_tokens, before.generation_tokens))
    yield str(entry.hits)
    yield str(entry.misses)
    yield "never" if entry.last_use is None else age_text(frame.clock_s - entry.last_use)


def name_text(entry: AdapterInfo) -> str:
    name = printable(entry.id)
    if len(name) > MAX_NAME_CHARACTERS:
        name = name[: MAX_NAME_CHARACTERS - 1] + "…"
    more = len(entry.names) - 1
    return f"{name} (+{more})" if more > 0 else name


def rate_text(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1f}/s"


def share_text(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def age_text(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
