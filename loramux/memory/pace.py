"""How fast loads go while steps run beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# For each second of work. A load of 20 MiB so takes about four steps of a small model on two
# cores.
REST = 6.0


class Pace:
    """A load's thread rests after each slice of its work, so that no step bears much of it.

    Even an idle core that a load uses is missing to the step loop for a moment: it has to be taken
    back, and so has the interpreter.
    """

    def __init__(
        self,
        rest: float = REST,
        *,
        worked_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`worked_s`: how long the calling thread has worked since some moment."""
        self._rest = rest
        self._worked_s = worked_s
        self._sleep = sleep
        self._is_awaited = False
        self._threads = threading.local()
        # Held during a rest: two threads together make little more work for a step than one.
        self._turn = threading.Lock()

    def begin(self) -> None:
        """This thread starts to load: what it did before needs no rest."""
        self._threads.worked_s = self._worked_s()

    def pause(self) -> None:
        """Called by a loading thread after each slice of its work."""
        if self._is_awaited:
            return
        with self._turn:
            self._sleep(self._rest * (self._worked_s() - self._threads.worked_s))
        self.begin()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within it the step loop has nothing to do but to wait for loads: nobody rests."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False
