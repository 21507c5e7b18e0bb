"""`loramux top`: memory, batch and adapters of a running server, live in the terminal."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loramux.cli.console import printable, show_error, size_text
from loramux.client.client import Client
from loramux.client.errors import ClientError, NotFound, Unavailable
from loramux.client.replies import AdapterInfo, EngineInfo, TierInfo
from loramux.client.wire import DEFAULT_URL
from loramux.errors import InvalidRequest

BAR_WIDTH = 30
MAX_NAME_CHARACTERS = 40
TIER_STYLES = {
    "device": "green",
    "host": "cyan",
    "disk": "yellow",
    "loading": "magenta",
    "failed": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The state of a server at one time, and the previous one for rates."""

    url: str
    engine: EngineInfo
    adapters: tuple[AdapterInfo, ...]
    """Adapters with the most traffic, busiest first."""
    taken_s: float
    """Monotonic time of the frame."""
    clock_s: float
    """Seconds since the epoch."""
    last: Frame | None = None

    def without_history(self) -> Self:
        return replace(self, last=None)

    def per_second(self, now: int, before: int) -> float | None:
        """Return the rate of a counter since the last frame; None without a comparable frame."""
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
        f"{printable(engine.gpu_name or engine.device)} {printable(engine.dtype)}  ",
        (printable(engine.status), style),
        f"  {clock}",
        f"  restarts {engine.restarts}" if engine.restarts else "",
        ("  q quits", "dim"),
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
    before = {entry.id: entry for entry in frame.last.adapters} if frame.last else {}
    for entry in frame.adapters:
        shown = "failed" if entry.state == "failed" else entry.tier
        tier = Text(printable(shown), TIER_STYLES.get(shown, ""))
        tier.append(" pinned" if entry.pinned else "", "bold")
        cells = adapter_cells(frame, entry, before.get(entry.id, entry))
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


TIMEOUT_S = 10.0
WaitForKey = Callable[[float], str]
"""Waits at most this many seconds; returns the key that was pressed, or an empty string."""


def top(
    url: Annotated[str, typer.Option(help="URL of the server.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two frames.")
    ] = 1.0,
    adapters: Annotated[
        int, typer.Option(min=0, max=1000, help="Number of adapters to show, busiest first.")
    ] = 20,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAMUX_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Watch a running server: tiers, batch, queue and the busiest adapters.

    q or Ctrl-C quits. Without a terminal, one frame is printed.
    """
    console, errors = Console(highlight=False), Console(stderr=True)
    try:
        client = Client(url, api_key=api_key, timeout_s=TIMEOUT_S, max_retries=0)
    except InvalidRequest as error:
        show_error(errors, str(error))
        raise typer.Exit(2) from error
    with client:
        try:
            frame = take_frame(client, adapters, None)
        except ClientError as error:
            show_error(errors, explained(error, url))
            raise typer.Exit(1) from error
        if once or not console.is_terminal:
            console.print(frame_view(frame))
            return
        with keys() as wait_for_key, live_screen(console) as show:
            watch(
                lambda last: take_frame(client, adapters, last),
                frame,
                show,
                wait_for_key,
                interval_s,
            )


def watch(
    take: Callable[[Frame], Frame],
    frame: Frame,
    show: Callable[[RenderableType], None],
    wait_for_key: WaitForKey,
    interval_s: float,
) -> None:
    """Redraw until q or Ctrl-C; an unreachable server is shown as an error and polled again."""
    fault: str | None = None
    try:
        while True:
            show(frame_view(frame, fault))
            if wait_for_key(interval_s) in ("q", "Q"):
                return
            try:
                frame, fault = take(frame), None
            except ClientError as error:
                fault = str(error)
    except KeyboardInterrupt:
        return


def take_frame(client: Client, num_adapters: int, last: Frame | None) -> Frame:
    engine = client.stats()
    try:
        adapters = client.adapters(busiest=num_adapters) if num_adapters else []
    except Unavailable:
        # The engine restarts; the server still answers /v1/stats.
        adapters = []
    return Frame(
        url=client.base_url,
        engine=engine,
        adapters=tuple(adapters),
        taken_s=time.monotonic(),
        clock_s=time.time(),
        last=None if last is None else last.without_history(),
    )


def explained(error: ClientError, url: str) -> str:
    if isinstance(error, NotFound):
        return f"The server at {url} is not loramux, or an older version: it has no /v1/stats."
    return str(error)


@contextmanager
def live_screen(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)


@contextmanager
def keys() -> Iterator[WaitForKey]:
    """Put the terminal into cbreak mode, and restore it afterwards."""
    if not sys.stdin.isatty():
        yield wait_without_keys
        return
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield wait_on_terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def wait_without_keys(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""


def wait_on_terminal(timeout_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return sys.stdin.read(1) if ready else ""
