"""The live view: one state, then changes, computed once for all that follow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loramux.backend.host import EngineStats, Health
from loramux.errors import EngineStopped
from loramux.metrics.server import Metrics
from loramux.server.context import Context, ServerOptions
from loramux.server.routes.page import MAX_CELLS, LiveFeed, cells_of
from tests.unit.server.asgi_client import run
from tests.unit.server.scripted_backend import ScriptedBackend

SOON_S = 0.01


def make_feed(backend: ScriptedBackend) -> tuple[LiveFeed, Metrics]:
    metrics = Metrics(backend)
    context = Context(
        backend=backend, options=ServerOptions(), metrics=metrics, names=backend.names
    )
    return LiveFeed(context, interval_s=SOON_S), metrics


def read(sent: bytes) -> tuple[str, dict[str, Any]]:
    name, data = sent.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_state_comes_first_and_then_only_what_changed() -> None:
    backend = ScriptedBackend()
    cid = next(iter(backend.adapters))
    name = backend.names.names_of(cid)[0]

    async def follow() -> None:
        feed, metrics = make_feed(backend)
        events = feed.events()
        kind, state = read(await anext(events))
        assert (kind, state["status"], state["running"]) == ("state", "ready", 0)
        backend.stats = EngineStats(
            num_running=3,
            num_pages=100,
            num_free_pages=40,
            num_adapter_pages=30,
            num_prefix_pages=20,
            running_adapters={cid: 3},
            waiting_tenants={"acme": 2},
            resident_adapters=(cid,),
        )
        backend.pages = b"aa.pk"
        metrics.first_token(0.25, num_prompt_tokens=8)
        kind, delta = read(await anext(events))
        assert kind == "delta" and "status" not in delta
        assert delta["running"] == 3 and delta["batch"] == {name: 3}
        assert delta["tenants"] == {"acme": 2} and delta["loaded"] == [name]
        assert delta["pages"] == {
            "total": 100, "free": 40, "adapters": 30, "prefixes": 20, "kv": 10
        }  # fmt: skip
        assert delta["ttft"] == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
        assert (state["map"], delta["map"]) == ("", "aa.pk")
        await events.aclose()
        assert feed.num_followers == 0

    run(follow())


def test_all_pages_get_the_same_events_and_a_slow_one_starts_over() -> None:
    backend = ScriptedBackend()

    async def follow() -> None:
        feed, _ = make_feed(backend)
        first, slow = feed.events(), feed.events()
        await anext(first)
        await anext(slow)
        taken = [await anext(first) for _ in range(12)]
        assert {read(sent)[0] for sent in taken} == {"delta"}
        kinds = [read(await anext(slow))[0] for _ in range(4)]
        assert "state" in kinds
        await first.aclose()
        await slow.aclose()

    run(follow())


def test_the_stream_ends_when_the_server_drains() -> None:
    backend = ScriptedBackend()

    async def follow() -> None:
        feed, _ = make_feed(backend)
        events = feed.events()
        await anext(events)
        backend.health = Health.DRAINING
        async with asyncio.timeout(5):
            last = [read(sent)[1] async for sent in events][-1]
        assert last["status"] == "draining"

    run(follow())


def test_adapters_that_came_and_went_are_named() -> None:
    backend = ScriptedBackend()
    first, second = backend.adapters
    backend.stats = EngineStats(resident_adapters=(first,))

    async def follow() -> None:
        feed, _ = make_feed(backend)
        events = feed.events()
        await anext(events)
        backend.stats = EngineStats(resident_adapters=(second,))
        delta = read(await anext(events))[1]
        names = backend.names
        assert delta["loaded"] == [names.names_of(second)[0]]
        assert delta["evicted"] == [names.names_of(first)[0]]
        again = read(await anext(events))[1]
        assert "loaded" not in again and "evicted" not in again
        await events.aclose()

    run(follow())


def test_an_engine_that_does_not_answer_leaves_the_last_map() -> None:
    backend = ScriptedBackend()
    backend.pages = b"kk"

    async def fails() -> bytes:
        raise EngineStopped("It has ended.")

    async def hangs() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def follow() -> None:
        feed, _ = make_feed(backend)
        events = feed.events()
        await anext(events)
        assert read(await anext(events))[1]["map"] == "kk"
        for answer in (fails, hangs):
            backend.page_kinds = answer  # type: ignore[method-assign]
            assert "map" not in read(await anext(events))[1]
        await events.aclose()

    run(follow())


def test_a_cell_is_what_most_of_its_pages_are() -> None:
    assert cells_of(b"") == ""
    assert cells_of(b"ka.p") == "ka.p"
    assert cells_of(b"kk.aa...pp..", 3) == "k.p"
    assert cells_of(b"k..a", 2) == "ka"
    large = cells_of(b"k" * 1000 + b"." * 101_234)
    assert len(large) == MAX_CELLS and set(large) == {"k", "."}
    assert large == "k" * large.count("k") + "." * large.count(".")
