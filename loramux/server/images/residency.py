"""The residency report of an image server, which has all its adapters in memory all the time."""

from __future__ import annotations

import asyncio
import secrets
import time

from loramux.backend import Health
from loramux.server.images.drawing import ImageContext
from loramux.types.replica_report import ResidencyReport
from loramux.types.residency import Tier, key_of_cid

_POLL_S = 0.05


class ImageResidency:
    def __init__(self, context: ImageContext) -> None:
        self._context = context
        self._instance = secrets.token_hex(8)

    async def wait_for_news(self, *, since: int, instance: str, wait_s: float) -> None:
        """Returns when the state or the number of adapters changes, or after `wait_s`."""
        before = (self._context.backend.health, self._generation)
        deadline = time.monotonic() + wait_s
        is_current = (instance, since) == (self._instance, self._generation)
        while is_current and time.monotonic() < deadline:
            await asyncio.sleep(min(_POLL_S, wait_s))
            is_current = before == (self._context.backend.health, self._generation)

    def report(self, *, since: int, instance: str) -> ResidencyReport:
        backend, load = self._context.backend, self._context.load
        is_current = (instance, since) == (self._instance, self._generation)
        has_card = backend.health is not Health.STARTING
        cids = () if is_current else tuple(backend.adapters)
        return ResidencyReport(
            instance=self._instance,
            since=since,
            generation=self._generation,
            full=not is_current,
            moves={key_of_cid(cid): int(Tier.DEVICE) for cid in cids},
            state=backend.health.value,
            base=self._context.names.base_names[0] if has_card else "",
            base_digest=backend.card.digest if has_card else "",
            revision=0,
            open=load.num_open,
            waiting=0,
            waiting_tokens=0,
            # Images share the denoiser: each makes the others slower by its own time.
            slots=1,
            step_s=load.image_s,
            token_s=0.0,
            tier_s=[0.0] * len(Tier),
            free_pages=0,
            answer_tokens=1.0,
        )

    @property
    def _generation(self) -> int:
        return len(self._context.backend.adapters)
