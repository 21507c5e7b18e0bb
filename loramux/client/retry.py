"""Delays between the attempts of a refused request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from loramux.client.errors import Retryable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter that respects Retry-After."""

    max_retries: int = 3
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    """No retry if the server requests a longer wait."""
    draw: Callable[[], float] = random.random
    """Jitter in [0, 1), which spreads clients that were refused together."""

    def delay_s(self, num_failures: int, error: Retryable) -> float | None:
        """Return the delay before the next attempt; None means no further attempt."""
        asked_s = error.retry_after_s
        if num_failures > self.max_retries or (asked_s or 0) > self.max_delay_s:
            return None
        grown_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_failures - 1, 16))
        if asked_s is None:
            return grown_s * (1 + self.draw()) / 2
        return min(self.max_delay_s, asked_s + grown_s * self.draw() / 2)


def parse_retry_after(text: str | None, clock: Callable[[], float] = time.time) -> float | None:
    """Parse a Retry-After header, which is seconds or a date; None if it is neither."""
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
