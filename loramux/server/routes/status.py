"""GET /health, /ping, /live, /version, /metrics, /v1/stats and /v1/residency."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from loramux import __version__
from loramux.backend.host import Health
from loramux.errors import InvalidRequest
from loramux.server.context import HostContext
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
from loramux.server.live.residency import Residencies
from loramux.types.caller import Caller
from loramux.types.replica_report import MAX_WAIT_S, ResidencyReport
from loramux.wire.text import EngineReport, HealthReport, Liveness, VersionReport

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
