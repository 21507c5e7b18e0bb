"""Tells the server that the threads of the engine process run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loramux.worker.pulse import Pulse

_HEARTBEAT_S = 0.5


@contextmanager
def beating(pulse: Pulse) -> Iterator[None]:
    """Count up from a thread of its own, which needs a core and the interpreter lock."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.is_set():
            pulse.beat()
            has_ended.wait(_HEARTBEAT_S)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()
    try:
        yield
    finally:
        has_ended.set()
