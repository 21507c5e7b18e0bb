"""`loramux top`: a running server's memory, batch and adapters, live in the terminal."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from loramux.cli.serve_view import show_error
from loramux.cli.top_view import Frame, frame_view
from loramux.client.client import Client
from loramux.client.errors import ClientError, NotFound, Unavailable
from loramux.client.wire import DEFAULT_URL
from loramux.errors import InvalidRequest

TIMEOUT_S = 10.0
WaitForKey = Callable[[float], str]
"""Waits that many seconds at most; the key that was pressed, or nothing."""


def top(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two frames.")
    ] = 1.0,
    adapters: Annotated[
        int, typer.Option(min=0, max=1000, help="How many of the busiest adapters to show.")
    ] = 20,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAMUX_API_KEY", help="Sent as a bearer token.")
    ] = None,
) -> None:
    """Watch a running server: tiers, batch, queue and the busiest adapters.

    q or Ctrl-C leaves. Without a terminal, one frame is printed.
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
    """Until q or Ctrl-C. A server that does not answer is told, and asked again."""
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
        # The engine is being started again; the server itself still tells what it knows.
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
        return f"The server at {url} is not loramux, or an older one: it has no /v1/stats."
    return str(error)


@contextmanager
def live_screen(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)


@contextmanager
def keys() -> Iterator[WaitForKey]:
    """Keys as they are pressed, not line by line; the terminal is left as it was."""
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
