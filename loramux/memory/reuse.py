"""What a new page of the prefix cache is worth, by how many of those before it were reused."""

from __future__ import annotations

# As multiples of the pool's pages: how many new pages halve the weight of those before, for how
# many that were all reused the estimate stands at the start, and how many evicted are remembered.
HALF_LIFE_POOLS = 1.0
PRIOR_POOLS = 1 / 32
GHOST_POOLS = 4
MIN_PRIOR_PAGES = 4.0
# Of new pages: where so many come back, one use is as good a sign of the next as it is elsewhere.
FULL_TRUST_SHARE = 0.5


class ReuseMeter:
    """Of the pages that were new lately, the share that was asked for a second time.

    Evicted pages are remembered by their path, as many as the pool has: a prompt that comes back
    too late is a reuse too. Otherwise a cache that evicts early would never find out.
    """

    def __init__(self, num_pages: int) -> None:
        self._prior = max(MIN_PRIOR_PAGES, num_pages * PRIOR_POOLS)
        self._fading = 0.5 ** (1 / max(1.0, num_pages * HALF_LIFE_POOLS))
        self._max_ghosts = GHOST_POOLS * num_pages
        self._num_new = 0.0
        self._num_reused = 0.0
        # Path and whether the page had been reused already; the longest gone first.
        self._ghosts: dict[int, bool] = {}

    @property
    def trust(self) -> float:
        """In a page that nobody has asked for again: above 0, at most 1, and 1 at the start."""
        share = (self._num_reused + self._prior) / (self._num_new + self._prior)
        return min(1.0, share / FULL_TRUST_SHARE)

    def added(self, path: int) -> bool:
        """A page was computed; True: it is no new one but one that was evicted too early."""
        was_reused = self._ghosts.pop(path, None)
        if was_reused is None:
            self._num_new = self._num_new * self._fading + 1
            self._num_reused *= self._fading
            return False
        if not was_reused:
            self.reused()
        return True

    def reused(self) -> None:
        """A page was asked for the second time."""
        self._num_reused += 1

    def evicted(self, path: int, *, was_reused: bool) -> None:
        self._ghosts[path] = was_reused
        if len(self._ghosts) > self._max_ghosts:
            del self._ghosts[next(iter(self._ghosts))]
