"""The residency report that routers poll: load, state, and moves between tiers, of all models."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.backend.host import Health
from loramux.server.context import HostContext
from loramux.types.replica_report import ResidencyReport
from loramux.types.residency import Moves, ResidencyView, key_of_cid, wait_for_move

# Before the engine has reported: of an adapter in no tier, on disk, in host memory, on the device.
_UNKNOWN_TIER_S = [0.5, 0.5, 0.05, 0.005, 0.0025, 0.0]


class Residencies:
    """The tiers of all engines of a server, as one view that a reader follows by generation."""

    def __init__(self, hosts: Sequence[HostContext]) -> None:
        self._hosts = hosts
        self._joined = ResidencyView()
        self._followed: tuple[ResidencyView, ...] = ()
        self._generations: list[int] = []

    @property
    def view(self) -> ResidencyView:
        """The view with all moves until now; another one after a restart of any engine."""
        views = self._views
        if len(views) == 1:
            return views[0]
        if views == self._followed:
            moves = self._moves(views)
            if not any(one.is_full for one in moves):
                return self._apply(moves)
        self._joined, self._followed = ResidencyView(), views
        self._generations = [-1] * len(views)
        return self._apply(self._moves(views))

    async def wait_for_news(self, *, since: int, instance: str, wait_s: float) -> None:
        """Return when something moved after a generation, a state changed, or after `wait_s`."""
        view = self.view
        is_leaving = any(
            host.backend.health in (Health.DRAINING, Health.STOPPED) for host in self._hosts
        )
        if instance != view.instance or since != view.generation or wait_s <= 0 or is_leaving:
            return
        await wait_for_move(self._views, wait_s)

    def report(self, *, since: int, instance: str) -> ResidencyReport:
        """State and load are those of all models together; speeds are those of the first one."""
        first, states = self._hosts[0], [host.backend.health for host in self._hosts]
        backend, stats = first.backend, [host.backend.stats for host in self._hosts]
        moves = self.view.since(since, instance)
        has_card = backend.health is not Health.STARTING
        registry = first.registry
        return ResidencyReport(
            instance=moves.instance,
            since=since,
            generation=moves.generation,
            full=moves.is_full,
            moves={key_of_cid(cid): int(tier) for cid, tier in moves.tiers.items()},
            state=next((one for one in states if one is not Health.READY), Health.READY).value,
            base=first.base_names[0] if has_card else "",
            base_digest=backend.card.digest if has_card else "",
            revision=0 if registry is None else registry.revision,
            open=sum(one.num_running + one.num_waiting for one in stats),
            waiting=sum(one.num_waiting for one in stats),
            waiting_tokens=stats[0].waiting_tokens,
            slots=sum(map(_slots, self._hosts)),
            step_s=stats[0].step_s,
            token_s=stats[0].token_s,
            tier_s=list(stats[0].tier_s) or _UNKNOWN_TIER_S,
            free_pages=stats[0].num_free_pages,
            answer_tokens=first.metrics.answer_tokens,
        )

    @property
    def _views(self) -> tuple[ResidencyView, ...]:
        return tuple(host.backend.residency for host in self._hosts)

    def _moves(self, views: Sequence[ResidencyView]) -> list[Moves]:
        seen = zip(views, self._generations, strict=True)
        return [view.since(generation, view.instance) for view, generation in seen]

    def _apply(self, moves: Sequence[Moves]) -> ResidencyView:
        for one in moves:
            self._joined.apply(one.tiers.items())
        self._generations = [one.generation for one in moves]
        return self._joined


def _slots(host: HostContext) -> int:
    """Estimates from the pages of the running sequences how many more would run at once."""
    if host.backend.health is Health.STARTING:
        return 1
    stats, max_sequences = host.backend.stats, host.backend.card.max_sequences
    if not stats.num_running:
        return max_sequences
    available = stats.num_free_pages + stats.num_idle_pages
    pages_each = max(1.0, (stats.num_pages - available) / stats.num_running)
    return max(1, min(max_sequences, stats.num_running + int(available / pages_each)))
