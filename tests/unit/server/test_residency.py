"""Residency reports: what a reader that follows them knows, and when they are answered."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.backend.host import EngineStats, Health
from loramux.types.residency import MAX_MOVES, ResidencyView, Tier, key_of_cid
from tests.unit.server.asgi_client import complete, get, make_app, run
from tests.unit.server.scripted_backend import ScriptedBackend, named

A, B = named("legal").cid, named("team/polite").cid


def report(backend: ScriptedBackend, **query: Any) -> dict[str, Any]:
    response = get(make_app(backend), "/v1/residency", params=query)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def cid_of(number: int) -> str:
    return "cidv1:sha256:" + hashlib.sha256(str(number).encode()).hexdigest()


actions = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([Tier.GONE, Tier.DISK, Tier.HOST, Tier.DEVICE])),
    max_size=8,
)


@given(steps=st.lists(st.tuples(actions, st.booleans(), st.booleans()), max_size=12))
def test_a_reader_of_the_moves_knows_every_tier(
    steps: list[tuple[list[tuple[int, Tier]], bool, bool]],
) -> None:
    """Also after full updates, skipped reports and restarts of the engine."""
    view, true = ResidencyView(), dict[str, Tier]()
    instance, generation, known = "", -1, dict[str, Tier]()
    for moved, is_full, restarts in steps:
        if restarts:
            view, true = ResidencyView(), {}
        moves = {cid_of(number): tier for number, tier in moved}
        true = moves if is_full else true | moves
        true = {cid: tier for cid, tier in true.items() if tier is not Tier.GONE}
        view.apply(moves.items(), is_full=is_full)
        if len(moves) % 3 == 2:
            continue
        told = view.since(generation, instance)
        known = {} if told.is_full else known
        known.update(told.tiers)
        instance, generation = told.instance, told.generation
        assert {cid: tier for cid, tier in known.items() if tier is not Tier.GONE} == true
        assert view.resident.keys() == {c for c, tier in true.items() if tier is Tier.DEVICE}


def test_a_reader_behind_the_log_gets_everything() -> None:
    view = ResidencyView()
    for number in range(MAX_MOVES + 2):
        view.apply([(cid_of(number % 3), Tier.HOST)])
    assert view.since(1, view.instance).is_full
    assert view.since(view.generation + 1, view.instance).is_full
    assert not view.since(2, view.instance).is_full


def test_a_report_has_moves_load_and_state() -> None:
    backend = ScriptedBackend()
    backend.stats = EngineStats(
        num_running=4, num_waiting=3, num_pages=10, num_free_pages=4, num_idle_pages=2,
        waiting_tokens=70, step_s=0.01, token_s=0.001, tier_s=(1, 1, 0.5, 0.2, 0.1, 0),
    )  # fmt: skip
    backend.residency.apply([(A, Tier.DEVICE), (B, Tier.HOST)])
    first = report(backend)
    assert first["full"] and first["moves"] == {key_of_cid(A): 5, key_of_cid(B): 3}
    assert (first["state"], first["base"]) == ("ready", "tiny-base")
    assert (first["open"], first["waiting"], first["waiting_tokens"]) == (7, 3, 70)
    # Four sequences take a page each, and six are free or idle.
    assert first["slots"] == 10 and first["tier_s"] == [1, 1, 0.5, 0.2, 0.1, 0]
    backend.residency.apply([(A, Tier.GONE)])
    query = {"since": first["generation"], "instance": first["instance"]}
    second = report(backend, **query)
    assert not second["full"] and second["moves"] == {key_of_cid(A): 0}
    backend.residency = ResidencyView()
    assert report(backend, **query)["full"]


@pytest.mark.parametrize("query", [{"since": "x"}, {"wait_s": "nan"}, {"wait_s": "x"}])
def test_a_query_that_is_no_number_is_refused(query: dict[str, str]) -> None:
    response = get(make_app(), "/v1/residency", params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in query


@pytest.mark.parametrize("news", ["move", "state", "restart"])
def test_a_waiting_reader_is_answered_at_once(news: str) -> None:
    backend = ScriptedBackend()
    app = make_app(backend)

    async def poll() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            query = {"since": 0, "instance": backend.residency.instance, "wait_s": 30}
            answer = asyncio.create_task(client.get("/v1/residency", params=query))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not answer.done()
            ended = backend.residency
            if news == "move":
                ended.apply([(A, Tier.DEVICE)])
            else:
                backend.health = Health.RESTARTING
                backend.residency = ResidencyView() if news == "restart" else ended
                ended.wake()
            return await answer

    told = run(poll()).json()
    assert told["moves"] == ({key_of_cid(A): 5} if news == "move" else {})
    assert told["state"] == ("ready" if news == "move" else "restarting")
    assert told["full"] == (news == "restart")


@pytest.mark.parametrize("health", list(Health))
def test_a_live_process_is_live_in_every_state(health: Health) -> None:
    backend = ScriptedBackend()
    backend.health = health
    assert get(make_app(backend), "/live").status_code == 200


def test_an_answer_names_its_adapter_and_where_it_was() -> None:
    backend = ScriptedBackend()
    backend.residency.apply([(A, Tier.HOST)])
    headers = complete(make_app(backend), model="legal").headers
    assert (headers["x-loramux-cid"], headers["x-loramux-tier"]) == (A, "host")
    headers = complete(make_app(backend), model="legal+team/polite").headers
    assert set(headers["x-loramux-cid"].split(",")) == {A, B}
    assert headers["x-loramux-tier"] == "source"
    of_base = complete(make_app(backend)).headers
    assert of_base["x-loramux-cid"] == "" and "x-loramux-tier" not in of_base
