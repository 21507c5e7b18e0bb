"""The failure and retry table, byte by byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loramux.router.app import RouterApp
from loramux.router.fleet import BACK_OFF_S, SILENT_S, State
from tests.unit.router.fake_replica import (
    STREAM_HEAD,
    FakeReplica,
    Reply,
    Request,
    ask,
    chunk,
    first_for,
    http,
    run,
    running_router,
    say_name,
)

ASKED = {"model": "a", "prompt": "x"}
CID = "cidv1:sha256:" + "ab" * 32


def answering(status: int, *headers: str) -> Any:
    async def script(replica: FakeReplica, request: Request, writer: Any) -> None:
        writer.write(http(status, json.dumps({"from": replica.name}).encode(), *headers))

    return script


async def reset(replica: FakeReplica, request: Request, writer: Any) -> None:
    writer.transport.abort()


async def stream(replica: FakeReplica, request: Request, writer: Any) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b""))


async def lost_stream(replica: FakeReplica, request: Request, writer: Any) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: {half"))
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()


async def lost_answer(replica: FakeReplica, request: Request, writer: Any) -> None:
    writer.write(http(200, b"x" * 100)[:-50])
    await writer.drain()
    writer.transport.abort()


def two(first_does: Any, then_does: Any = say_name, body: Any = ASKED, **options: Any) -> Any:
    """Return the reply, and both replicas in the order of the choice."""

    async def work() -> tuple[Reply, FakeReplica, FakeReplica, RouterApp]:
        replicas = [FakeReplica("0"), FakeReplica("1")]
        async with running_router(*replicas) as app:
            first, second = first_for(app, replicas, "a")
            first.script, second.script = first_does, then_does
            return await ask(app, body=body, **options), first, second, app

    return run(work())


@pytest.mark.parametrize(
    "does", [answering(502), answering(503), answering(504), answering(429), reset, lost_answer]
)
def test_what_another_replica_may_answer_goes_to_the_next(does: Any) -> None:
    reply, first, second, _ = two(does)
    assert (reply.status, reply.json) == (200, {"from": second.name})
    assert reply.headers["x-loramux-replica"] == second.id
    assert "127.0.0.1" not in str(reply.headers)
    assert len(second.requests) == 1
    ids = {one.headers["x-request-id"] for one in first.requests + second.requests}
    attempt = int(second.requests[0].headers["x-loramux-attempt"])
    assert len(ids) == 1 and attempt == len(first.requests) + 1


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 500])
def test_what_the_request_caused_is_answered_as_it_is(status: int) -> None:
    reply, first, second, _ = two(answering(status))
    assert (reply.status, reply.json) == (status, {"from": first.name})
    assert not second.requests


def test_a_refused_connection_takes_a_replica_out_for_a_while() -> None:
    async def work() -> None:
        replicas = [FakeReplica("0"), FakeReplica("1")]
        async with running_router(*replicas) as app:
            first, second = first_for(app, replicas, "a")
            await first.stop()
            reply = await ask(app, body=ASKED)
            assert reply.json == {"from": second.name}
            gone = app.fleet.replicas[first.url]
            assert gone.failed_until > 0 or gone.state == "unknown"
            assert first_for(app, replicas, "a") == [second]
            await first.start()
            for _ in range(int(BACK_OFF_S / 0.05) + 40):
                await asyncio.sleep(0.05)
                if len(first_for(app, replicas, "a")) == 2:
                    break
            best, _ = first_for(app, replicas, "a")
            assert (await ask(app, body=ASKED)).json == {"from": best.name}

    run(work())


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    async def close_after(replica: FakeReplica, request: Request, writer: Any) -> None:
        await say_name(replica, request, writer)
        await writer.drain()
        if len(replica.requests) == 1:
            # The close arrives while the next request is on its way.
            asyncio.get_running_loop().call_later(0.01, writer.transport.abort)

    async def work() -> None:
        replica = FakeReplica("0", script=close_after)
        async with running_router(replica) as app:
            for _ in range(3):
                assert (await ask(app, body=ASKED)).json == {"from": "0"}
                assert app.fleet.replicas[replica.url].failed_until == 0

    run(work())


def test_when_all_refuse_the_last_refusal_is_told_with_retry_after() -> None:
    reply, first, second, _ = two(answering(503), answering(503))
    assert (reply.status, reply.json) == (503, {"from": second.name})
    assert reply.headers["retry-after"] == "1" and len(first.requests) == 1


def test_when_all_are_full_the_smallest_retry_after_is_told() -> None:
    reply, first, _, _ = two(answering(429, "retry-after: 2"), answering(429, "retry-after: 7"))
    assert (reply.status, reply.headers["retry-after"]) == (429, "2")
    assert reply.json == {"from": first.name}


def test_an_unknown_name_is_asked_for_again_where_the_registry_is_newer() -> None:
    async def work() -> None:
        replicas = [
            FakeReplica("0", fields={"revision": 4}),
            FakeReplica("1", fields={"revision": 4}),
        ]
        async with running_router(*replicas) as app:
            first, second = first_for(app, replicas, "a")
            first.script = answering(404)
            assert (await ask(app, body=ASKED)).status == 404 and not second.requests
            second.fields["revision"] = 5
            while app.fleet.revision < 5:
                await asyncio.sleep(0.01)
            assert (await ask(app, body=ASKED)).json == {"from": second.name}

    run(work())


def test_a_lost_stream_ends_with_an_error_event() -> None:
    reply, _, second, _ = two(lost_stream, body=ASKED | {"stream": True})
    *events, last = reply.body.decode().strip().split("\n\n")
    assert events[0] == "data: 1" and b"[DONE]" not in reply.body
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502
    assert reply.is_complete and not second.requests


def test_a_stream_passes_unchanged() -> None:
    reply, _, _, _ = two(stream)
    assert reply.body == b"data: 1\n\ndata: [DONE]\n\n" and reply.is_complete
    assert reply.headers["content-type"] == "text/event-stream"


def test_bytes_pass_at_once() -> None:
    """Catches a relay that collects chunks."""

    async def work() -> None:
        go_on = asyncio.Event()

        async def halting(replica: FakeReplica, request: Request, writer: Any) -> None:
            writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await writer.drain()
            await go_on.wait()
            writer.write(chunk(b"data: 2\n\n") + chunk(b""))

        replica = FakeReplica("0", script=halting)
        async with running_router(replica) as app:
            reply = asyncio.create_task(ask(app, body=ASKED))
            while not replica.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not reply.done()
            go_on.set()
            assert [one for one in (await reply).chunks if one] == [b"data: 1\n\n", b"data: 2\n\n"]

    run(work())


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def endless(replica: FakeReplica, request: Request, writer: Any) -> None:
            writer.write(STREAM_HEAD)
            try:
                while True:
                    writer.write(chunk(b"data: 1\n\n"))
                    await writer.drain()
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        replica, leaves = FakeReplica("0", script=endless), asyncio.Event()
        async with running_router(replica) as app:
            reply = asyncio.create_task(ask(app, body=ASKED, leaves=leaves))
            while not replica.requests:
                await asyncio.sleep(0.01)
            leaves.set()
            await reply
            await ended.wait()
            assert app.fleet.replicas[replica.url].own == 0

    run(work())


def test_a_request_to_a_replica_that_falls_silent_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loramux.router.relay.SILENT_S", 0.5)

    async def hang(replica: FakeReplica, request: Request, writer: Any) -> None:
        replica.is_silent = True
        await asyncio.sleep(60)

    reply, first, second, app = two(hang)
    assert reply.json == {"from": second.name} and len(first.requests) == 1
    assert SILENT_S > 0.5


def test_names_and_keys_pass_through_and_the_client_is_named() -> None:
    headers = {"authorization": "Bearer k", "x-tenant": "acme", "x-forwarded-for": "10.9.9.9"}
    reply, first, _, _ = two(say_name, headers=headers | {"x-request-id": "mine"})
    (sent,) = first.requests
    assert reply.status == 200 and sent.json == ASKED
    assert (sent.headers["authorization"], sent.headers["x-tenant"]) == ("Bearer k", "acme")
    assert sent.headers["x-forwarded-for"] == "10.9.9.9, 10.1.2.3"
    assert sent.headers["x-request-id"] == "mine"


def test_an_answer_teaches_what_a_name_means() -> None:
    *_, app = two(answering(200, f"x-loramux-cid: {CID}"))
    assert app.fleet.keys_of("a") == ("ab" * 8,)


def test_a_change_of_names_is_not_repeated_after_it_may_have_happened() -> None:
    async def work() -> None:
        replicas = [FakeReplica("0", script=reset), FakeReplica("1", script=reset)]
        async with running_router(*replicas) as app:
            reply = await ask(app, "/v1/adapters", {"reference": "a", "source": "/x"})
            assert reply.status == 502
            assert sum(len(replica.requests) for replica in replicas) == 1

    run(work())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/keys"),
        ("POST", "/v1/keys/k/rotate"),
        ("DELETE", "/v1/keys/k"),
        ("POST", "/flush_cache"),
        ("GET", "/flush_cache"),
        ("POST", "/v1/unknown"),
        ("PUT", "/v1/completions"),
        ("DELETE", "/v1/adapters/t/a"),
    ],
)
@pytest.mark.parametrize("does", [reset, answering(503), answering(429)])
def test_what_may_have_had_an_effect_is_executed_once(method: str, path: str, does: Any) -> None:
    async def work() -> None:
        replicas = [FakeReplica(str(i), script=does) for i in range(3)]
        async with running_router(*replicas) as app:
            reply = await ask(app, path, {}, method=method)
            assert reply.status in (429, 502, 503)
            assert sum(len(replica.requests) for replica in replicas) == 1

    run(work())


def test_a_change_goes_to_another_replica_where_one_was_not_reached() -> None:
    async def work() -> None:
        replicas = [FakeReplica("0"), FakeReplica("1")]
        async with running_router(*replicas) as app:
            first, second = first_for(app, replicas, "")
            await first.stop()
            gone = app.fleet.replicas[first.url]
            while gone.state is not State.UNKNOWN:
                await asyncio.sleep(0.01)
            # As if its last report had come just before.
            gone.state = State.READY
            assert first_for(app, replicas, "")[0] is first
            assert (await ask(app, "/v1/keys", {})).json == {"from": second.name}
            await first.start()

    run(work())


@pytest.mark.parametrize("does", [answering(503), answering(429), reset])
def test_a_request_is_tried_three_times_at_most(does: Any) -> None:
    async def work() -> None:
        replicas = [FakeReplica(str(i), script=does) for i in range(8)]
        async with running_router(*replicas) as app:
            assert (await ask(app, body=ASKED)).status in (429, 503)
            assert sum(len(replica.requests) for replica in replicas) == 3
            tries = [r.headers["x-loramux-attempt"] for one in replicas for r in one.requests]
            assert sorted(tries) == ["1", "2", "3"]

    run(work())


def test_a_fleet_that_is_full_gets_a_fifth_more_requests() -> None:
    async def work() -> None:
        replicas = [FakeReplica(str(i), script=answering(429)) for i in range(4)]
        async with running_router(*replicas) as app:
            for _ in range(200):
                assert (await ask(app, body=ASKED)).status == 429
            total = sum(len(replica.requests) for replica in replicas)
            # The reserve of a router that starts is 20.
            assert 220 <= total <= 200 * 1.2 + 21
            text = (await ask(app, "/metrics", method="GET")).body.decode()
            assert "loramux_router:retries_over_budget_total 1" in text

    run(work())


def test_a_replica_that_fails_quickly_is_ejected() -> None:
    async def work() -> None:
        replicas = [FakeReplica(str(i)) for i in range(3)]
        async with running_router(*replicas) as app:
            bad = first_for(app, replicas, "base")[0]
            bad.script = answering(500)
            statuses = [(await ask(app, body={"model": "base"})).status for _ in range(100)]
            assert 1 <= statuses.count(500) <= 6
            (ejected,) = [r for r in app.fleet.replicas.values() if r.conduct.ejected_until]
            assert ejected.url == bad.url
            # When its time has passed, one request at a time probes it.
            bad.script = say_name
            ejected.conduct.ejected_until = 1e-9
            for _ in range(50):
                assert (await ask(app, body={"model": "base"})).status == 200
            assert ejected.conduct.ejected_until == 0 and len(bad.requests) > 6

    run(work())


def test_a_replica_that_promises_too_much_gets_less() -> None:
    async def slow(replica: FakeReplica, request: Request, writer: Any) -> None:
        await asyncio.sleep(0.15)
        await say_name(replica, request, writer)

    async def work() -> None:
        liar = FakeReplica("0", script=slow, fields={"step_s": 0.0, "tier_s": [0.0] * 6})
        others = [FakeReplica(str(i), fields={"tier_s": [0.01] * 6}) for i in (1, 2)]
        async with running_router(liar, *others) as app:
            for number in range(60):
                await ask(app, body={"model": f"a{number}"})
            # Without own measurements it would get them all.
            assert len(liar.requests) < 20

    run(work())


@pytest.mark.parametrize("cid", ["zz", "cidv1:sha256:" + "g" * 64, "x:" + "0" * 16])
def test_a_content_id_of_an_answer_that_is_none_is_not_believed(cid: str) -> None:
    async def work() -> None:
        replica = FakeReplica("0", script=answering(200, f"x-loramux-cid: {cid}"))
        async with running_router(replica, FakeReplica("1")) as app:
            for _ in range(3):
                assert (await ask(app, body=ASKED)).status == 200

    run(work())


def test_without_any_replica_requests_are_refused_with_retry_after() -> None:
    async def work() -> None:
        replica = FakeReplica("0")
        async with running_router(replica) as app:
            await replica.stop()
            reply = await ask(app, body=ASKED)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")

    run(work())


@pytest.mark.parametrize(
    ("headers", "keys"), [((), 1), (("x-loramux-cid: ",), 0), ((f"x-loramux-cid: {CID}",), 1)]
)
def test_only_an_answer_that_says_so_makes_a_name_one_of_the_base(
    headers: tuple[str, ...], keys: int
) -> None:
    *_, app = two(answering(200, *headers))
    assert len(app.fleet.keys_of("a")) == keys
