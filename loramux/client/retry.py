"""When to send a refused request again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from loramux.client.errors import Retryable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    max_retries: int = 3
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    """A server that asks for a longer wait is not waited for."""
    draw: Callable[[], float] = random.random
    """In [0, 1): spreads out clients that were refused together."""

    def delay_s(self, num_failures: int, error: Retryable) -> float | None:
        """None: give up."""
        asked_s = error.retry_after_s
        if num_failures > self.max_retries or (asked_s or 0) > self.max_delay_s:
            return None
        grown_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_failures - 1, 16))
        if asked_s is None:
            return grown_s * (1 + self.draw()) / 2
        return min(self.max_delay_s, asked_s + grown_s * self.draw() / 2)


def parse_retry_after(text: str | None, clock: Callable[[], float] = time.time) -> float | None:
    """Seconds, or a date, as HTTP allows both; None if it is neither."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - clock())
    except ValueError:
        return None
