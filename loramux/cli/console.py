"""Output helpers of the commands: escaped text, sizes, errors and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBar
from rich.text import Text

from loramux.base.progress import size_text as size_text


def say(console: Console, label: str, text: str, *, style: str) -> None:
    console.print(Text(label, style), Text(printable(text)), sep="", soft_wrap=True)


def printable(text: str) -> str:
    """Escape control characters: names from adapter files could contain terminal sequences."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def show_error(console: Console, message: str) -> None:
    say(console, "error: ", message, style="bold red")


@contextmanager
def working(stage: str) -> Iterator[None]:
    """Show a spinner with the stage and its duration; outside a terminal show nothing."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ProgressBar(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(stage, total=None)
        yield


LINE_EVERY_S = 5.0


@contextmanager
def counting(stage: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows (done, total): a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    said_s = time.monotonic()
    with ProgressBar(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(stage, total=None)

        def show(done: int, total: int) -> None:
            nonlocal said_s
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said_s >= LINE_EVERY_S:
                said_s = time.monotonic()
                console.print(Text(f"{stage}: {done} of {total}"), soft_wrap=True)

        yield show


class ByteView:
    """A ByteSink with a progress bar on a terminal, and a line every few seconds elsewhere."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""
        self._total_bytes: int | None = None
        self._done_bytes = 0
        self._said_s = clock()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, what: str, total_bytes: int | None) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(escape(printable(what)), total=total_bytes)

    def add(self, num_bytes: int) -> None:
        self.set_done(self._done_bytes + num_bytes, self._total_bytes)

    def set_done(self, done_bytes: int, total_bytes: int | None) -> None:
        self._done_bytes, self._total_bytes = done_bytes, total_bytes
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes, total=total_bytes)
        now_s = self._clock()
        if not self._console.is_terminal and now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            self._console.print(Text(self._line()), soft_wrap=True)

    def _line(self) -> str:
        total = "" if self._total_bytes is None else f" of {size_text(self._total_bytes)}"
        return f"{printable(self._what)}: {size_text(self._done_bytes)}{total}"
