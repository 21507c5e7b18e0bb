"""GET /health, /ping, /version, /metrics and /v1/stats."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from loramux import __version__
from loramux.backend import Health, TierStats
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.openapi import answering, deep_parameter, health_answers, text_answer
from loramux.server.wire import EngineReport, HealthReport, TierEntry, VersionReport

_log = logging.getLogger(__name__)
YES = frozenset({"1", "true", "yes", "on"})


def status_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["status"])
    probing = asyncio.Lock()

    @router.get("/health", **health_answers(deep_parameter()))
    async def health(request: Request) -> Response:
        """200 while requests are accepted; `deep` also generates a token and loads an adapter."""
        is_deep = request.query_params.get("deep", "").lower() in YES
        report = _report(context)
        if is_deep and context.backend.health is Health.READY:
            await _probe(context, report, probing)
        return _response(report)

    @router.get("/ping", **health_answers())
    async def ping() -> Response:
        return _response(_report(context))

    for path, methods in (("/health", ["HEAD", "POST"]), ("/ping", ["HEAD", "POST"])):
        router.add_api_route(
            path, ping, methods=methods, name=f"other_{path[1:]}", include_in_schema=False
        )

    @router.get("/version", **answering(VersionReport))
    async def version() -> Response:
        return json_response(VersionReport(version=__version__))

    @router.get("/metrics", **text_answer())
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/stats", **answering(EngineReport, 503))
    async def stats() -> Response:
        """Batch, queue, pages and tiers of the engine."""
        context.require_known()
        return json_response(_engine_report(context))

    return router


def _engine_report(context: Context) -> EngineReport:
    backend, total = context.backend, context.metrics.total
    stats, card = backend.stats, backend.card
    return EngineReport(
        model=context.base_names[0],
        status=backend.health.value,
        restarts=backend.num_restarts,
        device=card.device,
        gpu_name=card.gpu_name,
        fallback_reason=card.fallback_reason,
        dtype=card.dtype,
        max_batch_tokens=card.max_batch_tokens,
        max_sequences=card.max_sequences,
        running=stats.num_running,
        waiting=stats.num_waiting,
        steps=stats.num_steps,
        preemptions=stats.num_preemptions,
        pages=stats.num_pages,
        free_pages=stats.num_free_pages,
        page_bytes=card.pool_bytes // stats.num_pages if stats.num_pages else 0,
        requests=total.num_requests,
        prompt_tokens=total.num_prompt_tokens,
        generation_tokens=total.num_generation_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        tiers=[_tier_entry(tier) for tier in stats.tiers],
    )


def _tier_entry(tier: TierStats) -> TierEntry:
    return TierEntry(
        tier=tier.tier,
        budget_bytes=tier.budget_bytes,
        used_bytes=tier.used_bytes,
        adapters=tier.num_adapters,
        hits=tier.hits,
        misses=tier.misses,
        loads=tier.loads,
        evictions=tier.evictions,
        failures=tier.failures,
        load_seconds=tier.load_seconds,
        load_bytes=tier.load_bytes,
    )


def _report(context: Context) -> HealthReport:
    backend = context.backend
    stats = backend.stats
    return HealthReport(
        status=backend.health.value,
        restarts=backend.num_restarts,
        running=stats.num_running,
        waiting=stats.num_waiting,
    )


async def _probe(context: Context, report: HealthReport, probing: asyncio.Lock) -> None:
    """Run one probe at a time, so that health checks cannot overload the engine."""
    timeout_s = context.options.probe_timeout_s
    try:
        async with asyncio.timeout(timeout_s + 1), probing:
            report.checks = await context.backend.probe(timeout_s)
    except TimeoutError:
        report.status, report.failure = "failing", f"No answer within {timeout_s:g} s."
    except Exception as error:
        _log.exception("a deep health check failed")
        report.status, report.failure = "failing", f"{type(error).__name__}: {error}"
    report.restarts = context.backend.num_restarts


def _response(report: HealthReport) -> Response:
    return json_response(report, status=200 if report.status == Health.READY else 503)
