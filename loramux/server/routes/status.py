"""GET /health, /ping, /live, /version, /metrics, /v1/stats and /v1/residency."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from loramux import __version__
from loramux.backend.host import Health
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import (
    answering,
    deep_parameter,
    health_answers,
    residency_parameters,
    text_answer,
)
from loramux.server.http.routes import Route, Routes
from loramux.server.live.reports import engine_report
from loramux.server.naming.view import View
from loramux.types.caller import Caller
from loramux.types.replica_report import MAX_WAIT_S, ResidencyReport
from loramux.types.residency import Moves, ResidencyView, key_of_cid, wait_for_move
from loramux.wire.text import EngineReport, HealthReport, Liveness, VersionReport


def doctor_routes(context: HostContext) -> list[Route]:
    routes = Routes("adapters")

    @routes.get(
        "/v1/doctor/{name:path}",
        answering(dict[str, Any], 400, 404, 502, 503, path_name="name"),
    )
    async def examine_adapter(request: Call) -> Response:
        """Return the report of `loramux doctor --json` on an adapter, which is read for it."""
        name = request.path_params["name"]
        view = context.view_of(request.caller)
        host = await context.host_for(name, view)
        host.require_ready()
        folder = await _folder(host, name, view)
        return json_response(await host.backend.examine_adapter(folder))

    return routes.found


async def _folder(context: HostContext, name: str, view: View) -> str:
    """Return the folder of an adapter, also of one that is refused."""
    given = context.names.find(name) if view.sees_given(name) else None
    if given is not None:
        return given.path
    card = context.backend.adapters.get(name) if view.is_whole else None
    if card is not None:
        return card.path
    if context.registry is None:
        raise NotServed(f"The adapter `{name}` does not exist.", param="name")
    try:
        resolved = await context.registry.resolve(name, sticky_key="", view=view)
    except AdapterNotFound as error:
        raise NotServed(str(error), param="name") from error
    if resolved.recipe is not None:
        raise InvalidRequest(f"{name} is a recipe and has no files. Name its parts.", param="name")
    return str(await context.registry.materialize(resolved.cid))


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


_log = logging.getLogger(__name__)
N = TypeVar("N", int, float)
YES = frozenset({"1", "true", "yes", "on"})


def status_routes(context: HostContext) -> list[Route]:
    routes = Routes("status")
    probing = asyncio.Lock()
    residencies = Residencies(context.hosts)
    followed = answering(ResidencyReport, 400, parameters=residency_parameters())

    @routes.get("/health", health_answers(deep_parameter()))
    async def health(request: Call) -> Response:
        """200 while requests are accepted; `deep` also generates a token and loads an adapter."""
        is_deep = request.query_params.get("deep", "").lower() in YES
        report = _report(context)
        if is_deep and report.status == Health.READY:
            await _probe(context, report, probing)
            _hide_reason(report, request.known_caller)
        return _response(report)

    @routes.get("/ping", health_answers())
    async def ping(_: Call) -> Response:
        return _response(_report(context))

    for path in ("/health", "/ping"):
        routes.add(path, ping, "HEAD", "POST")

    @routes.get("/live", answering(Liveness))
    async def live(_: Call) -> Response:
        """200 as long as this process answers, also while it drains or the engine restarts."""
        return json_response(Liveness())

    routes.add("/live", live, "HEAD")

    @routes.get("/version", answering(VersionReport))
    async def version(_: Call) -> Response:
        return json_response(VersionReport(version=__version__))

    @routes.get("/metrics", text_answer())
    async def metrics(request: Call) -> Response:
        """Metrics in Prometheus' text format; for a key of a tenant its own."""
        tenant = request.caller.confined_to
        shown = context.metrics
        text = shown.render() if tenant is None else shown.render_tenant(tenant)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/stats", answering(EngineReport, 503))
    async def stats(_: Call) -> Response:
        """Batch, queue, pages and tiers of the engine."""
        context.require_known()
        return json_response(engine_report(context))

    @routes.get("/v1/residency", followed)
    async def residency(request: Call) -> Response:
        """Load, state, and adapters that moved after `since`; waits up to `wait_s` for a move."""
        asked = request.query_params
        since, instance = _number(asked, "since", -1, int), asked.get("instance", "")
        wait_s = min(_number(asked, "wait_s", 0.0, float), MAX_WAIT_S)
        await residencies.wait_for_news(since=since, instance=instance, wait_s=wait_s)
        return json_response(residencies.report(since=since, instance=instance))

    return routes.found


def _hide_reason(report: HealthReport, caller: Caller) -> None:
    """Leaves the reason of a failure, which may name adapters, to operators."""
    if report.failure and not caller.is_operator:
        report.failure = "The check failed; the log of the server has the reason."


def _number(asked: Mapping[str, str], name: str, default: N, kind: Callable[[str], N]) -> N:
    """Read a finite number of the query; raise InvalidRequest."""
    try:
        number = kind(asked[name]) if name in asked else default
    except ValueError as error:
        raise InvalidRequest(f"{name} is no number: {asked[name][:50]!r}.", param=name) from error
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be finite.", param=name)
    return number


def _report(context: HostContext) -> HealthReport:
    """Return the health of all backends; the server is ready if each of them is."""
    found = [_host_report(host) for host in context.hosts]
    worst = next((one for one in found if one.status != Health.READY), found[0])
    report = HealthReport(
        status=worst.status,
        restarts=sum(one.restarts for one in found),
        running=sum(one.running for one in found),
        waiting=sum(one.waiting for one in found),
    )
    if context.has_images:
        report.models = {host.modality: one for host, one in zip(context.hosts, found, strict=True)}
    return report


def _host_report(host: HostContext) -> HealthReport:
    backend, stats = host.backend, host.backend.stats
    return HealthReport(
        status=backend.health.value,
        restarts=backend.num_restarts,
        running=stats.num_running,
        waiting=stats.num_waiting,
    )


async def _probe(context: HostContext, report: HealthReport, probing: asyncio.Lock) -> None:
    """Run one probe at a time, so that health checks cannot overload the engine."""
    timeout_s = context.options.probe_timeout_s
    try:
        async with asyncio.timeout(timeout_s + 1), probing:
            report.checks = await _checks(context, timeout_s)
    except TimeoutError:
        report.status, report.failure = "failing", f"No answer within {timeout_s:g} s."
    except Exception as error:
        _log.exception("a deep health check failed")
        report.status, report.failure = "failing", f"{type(error).__name__}: {error}"
    report.restarts = sum(host.backend.num_restarts for host in context.hosts)


async def _checks(context: HostContext, timeout_s: float) -> dict[str, float]:
    """Probes all backends; the checks of other ones than the first begin with their kind."""
    checks = await context.backend.probe(timeout_s)
    for host in context.others:
        found = await host.backend.probe(timeout_s)
        checks |= {f"{host.modality}_{name}": seconds for name, seconds in found.items()}
    return checks


def _response(report: HealthReport) -> Response:
    return json_response(report, status=200 if report.status == Health.READY else 503)
