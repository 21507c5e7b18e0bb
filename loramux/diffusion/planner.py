"""Chooses the images of the next forward; pure Python, without torch and without a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from loramux.config.images import MAX_IMAGE_TOKENS
from loramux.scheduler.fairness import Clients, FairShares
from loramux.types.image import ImageRequest

Batching = Literal["mixed", "bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    max_tokens: int = MAX_IMAGE_TOKENS
    """Image tokens of one forward, over all rows; a single larger image runs alone."""
    max_images: int = 16
    batching: Batching = "mixed"
    """`bucket`: all images of a forward have one selection of adapters."""

    def num_images(self, tokens: int) -> int:
        """Return how many images of this many tokens the largest forward has."""
        return min(max(self.max_tokens // tokens, 1), self.max_images)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    number: int
    request: ImageRequest
    key: tuple[object, ...]
    tokens: int
    clients: Clients

    @property
    def rank(self) -> tuple[float, float, int]:
        return self.clients.tenant.counter, self.clients.adapter.counter, self.number


class Planner:
    """All images that wait for their next step.

    The image with the lowest counters of tenant and adapter decides the key of the forward, and
    others of this key join in the same order. A step costs the tokens of its rows.
    """

    def __init__(self, limits: PlanLimits) -> None:
        self._limits = limits
        self._shares = FairShares()
        self._entries: dict[str, _Entry] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: ImageRequest, key: tuple[object, ...], tokens: int) -> None:
        """`key`: images with equal keys may share a forward; `tokens`: those of all its rows."""
        if self._limits.batching == "bucket":
            key = (*key, request.selection)
        clients = self._shares.arrive(request)
        self._entries[request.request_id] = _Entry(self._next_number, request, key, tokens, clients)
        self._next_number += 1

    def remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._shares.leave(entry.request, entry.clients, is_running=False)

    def next_images(self, may_run: Callable[[str], bool] = lambda request_id: True) -> list[str]:
        """Return the request ids of the next forward and charge their clients for it.

        `may_run` is asked in the fair order; an image that may not keeps its place.
        """
        order = sorted(self._entries.values(), key=lambda entry: entry.rank)
        chosen: list[_Entry] = []
        tokens = 0
        for entry in order:
            if chosen and (
                entry.key != chosen[0].key or tokens + entry.tokens > self._limits.max_tokens
            ):
                continue
            if not may_run(entry.request.request_id):
                continue
            chosen.append(entry)
            tokens += entry.tokens
            if len(chosen) == self._limits.max_images:
                break
        for entry in chosen:
            entry.clients.charge(entry.tokens)
        return [entry.request.request_id for entry in chosen]

    def check_integrity(self) -> None:
        self._shares.check_integrity((entry.request for entry in self._entries.values()), ())
