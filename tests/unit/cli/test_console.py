from __future__ import annotations

import io

from rich.console import Console

from loramux.cli.console import LINE_EVERY_S, ByteView
from tests.registry_factory import FakeClock

MEBIBYTE = 2**20


def written(*, is_terminal: bool, pause_s: float) -> str:
    clock, out = FakeClock(), io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    with ByteView(console, clock=clock) as view:
        view.begin("Storing", 4 * MEBIBYTE)
        for _ in range(4):
            clock.advance(pause_s)
            view.add(MEBIBYTE)
        view.begin("Fetching [red]x", None)
        clock.advance(pause_s)
        view.set_done(2 * MEBIBYTE, None)
    return out.getvalue()


def test_a_terminal_gets_a_bar_with_bytes() -> None:
    drawn = written(is_terminal=True, pause_s=0)
    assert "Storing" in drawn or "Fetching [red]x" in drawn
    assert "MiB" in drawn


def test_elsewhere_long_work_is_a_line_now_and_then_and_short_work_none() -> None:
    assert written(is_terminal=False, pause_s=0.1) == ""
    lines = written(is_terminal=False, pause_s=LINE_EVERY_S).splitlines()
    assert lines == [
        "Storing: 1 MiB of 4 MiB",
        "Storing: 2 MiB of 4 MiB",
        "Storing: 3 MiB of 4 MiB",
        "Storing: 4 MiB of 4 MiB",
        "Fetching [red]x: 2 MiB",
    ]
