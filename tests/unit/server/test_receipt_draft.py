"""Receipts: one for every answer, however it ends, with what really served it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from loramux.backend.text import Delta
from loramux.errors import EngineBusy, EngineStopped
from loramux.receipts.issuer import ReceiptIssuer, RefusalBudget
from loramux.receipts.receipt import Receipt, Verdict, check
from loramux.server.generate.receipt_draft import NO_FACTS, slowest
from loramux.types.request import Request, RequestFacts
from tests.unit.server.asgi_client import (
    CHAT,
    COMPLETIONS,
    OpenCall,
    chat,
    complete,
    events_of,
    make_app,
    run,
)
from tests.unit.server.scripted_backend import (
    CARD,
    Script,
    ScriptedBackend,
    delta,
    named,
    say_hello,
)

FACTS = RequestFacts("disk", 0.05, 4, 0.125, 3)


class Kept(list[Receipt]):
    def add(self, receipt: Receipt) -> None:
        self.append(receipt)

    num_dropped = 0

    def find(self, receipt_id: str) -> Receipt | None:
        return None


def with_facts(script: Script, *facts: RequestFacts) -> Script:
    async def told(job: Request) -> AsyncIterator[Delta]:
        number = int(job.request_id.rpartition("-")[2])
        is_first = True
        async for item in script(job):
            yield replace(item, facts=facts[number], num_reused=1) if is_first else item
            is_first = False

    return told


def serve(script: Script = say_hello, **issuer: Any) -> tuple[Any, ScriptedBackend, Kept]:
    kept, backend = Kept(), ScriptedBackend(script)
    settings = {"in_streams": True, "pool_id": "us-west-2/pool-3", "writer": kept, **issuer}
    return make_app(backend, receipts=ReceiptIssuer(**settings)), backend, kept


def test_a_receipt_has_the_fields_that_tell_why_an_answer_was_slow() -> None:
    app, backend, kept = serve(with_facts(say_hello, FACTS))
    response = chat(app, model="legal", adapters=["legal"], adapter_weights=[0.5])
    told = response.json()["serving"]
    assert told["latency_ms"] >= told["ttft_ms"] > 0
    expected = {
        "format": "loramux-receipt/1",
        "base_model": "tiny-base@0123456",
        "base_digest": CARD.digest,
        "tenant": "default",
        "adapter_cid": named("legal").cid,
        "pool_id": "us-west-2/pool-3",
        "tier_found": "disk",
        "cold_miss": True,
        "load_ms": 50.0,
        "queue_depth": 4,
        "queue_ms": 125.0,
        "prompt_tokens": response.json()["usage"]["prompt_tokens"],
        "completion_tokens": 9,
        "reused_tokens": 1,
        "distinct_adapters": 3,
        "status": "completed",
    }
    assert {name: told[name] for name in expected} == expected
    (adapter,) = told["adapters"]
    assert (adapter["name"], adapter["weight"]) == ("legal", 0.5)
    assert response.headers["x-loramux-receipt"] == told["id"] == kept[0].id
    assert kept[0].body() == told


def test_a_receipt_lists_all_parts_of_a_sum_in_the_order_of_the_request() -> None:
    app, backend, _ = serve()
    told = complete(app, model="0*legal+-0.5*team/polite").json()["serving"]
    parts = [(part["name"], part["weight"]) for part in told["adapters"]]
    assert parts == [("legal", 0.0), ("team/polite", -0.5)]
    assert told["adapter_cid"] == named("team/polite").cid, "the first one that is used"
    assert backend.requests[0].selection == ((named("team/polite").cid, -0.5),)
    unused = complete(app, adapters=["legal"], adapter_weights=[0]).json()["serving"]
    assert (unused["adapter_cid"], unused["adapters"][0]["weight"]) == (None, 0.0)


def test_the_base_alone_has_no_adapter_and_no_cold_miss() -> None:
    app, _, _ = serve(with_facts(say_hello, RequestFacts(None, 0.0, 0, 0.0, 0)))
    told = complete(app).json()["serving"]
    assert (told["adapter_cid"], told["adapters"], told["cold_miss"]) == (None, [], False)


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_stream_ends_with_its_receipt_without_choices(ask: Any) -> None:
    app, _, kept = serve()
    response = ask(app, stream=True, stream_options={"include_usage": True})
    *_, usage, last, done = events_of(response.text)
    assert done == "[DONE]" and "usage" in usage and "usage" not in last
    assert last["choices"] == [] and last["id"] == usage["id"]
    assert last["object"] == usage["object"]
    assert last["serving"]["id"] == response.headers["x-loramux-receipt"] == kept[0].id
    assert last["serving"]["completion_tokens"] == 9


def test_streams_without_the_event_still_have_the_header_and_the_receipt() -> None:
    """A client that reads choices[0] of every chunk must not break by default."""
    app, _, kept = serve(in_streams=False)
    response = chat(app, stream=True)
    assert all(chunk["choices"] for chunk in events_of(response.text)[:-1])
    assert response.headers["x-loramux-receipt"] == kept[0].id


def test_nothing_is_written_where_receipts_are_off() -> None:
    app, _, kept = serve(is_on=False)
    response = chat(app)
    assert "serving" not in response.json() and not kept
    assert "x-loramux-receipt" not in response.headers
    assert "serving" not in chat(app, stream=True).text


async def dies(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"ab")
    raise EngineStopped("The engine died.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_reply_has_a_receipt_with_its_status(stream: bool) -> None:
    app, _, kept = serve(dies)
    response = complete(app, stream=stream, model="legal")
    (receipt,) = kept
    assert response.headers["x-loramux-receipt"] == receipt.id
    assert receipt.body()["status"] == "failed" and receipt.completion_tokens == 2
    assert "serving" not in response.text


def test_a_request_without_a_token_has_no_ttft() -> None:
    async def dies_at_once(job: Request) -> AsyncIterator[Delta]:
        raise EngineStopped("The engine died.")
        yield

    app, _, kept = serve(dies_at_once)
    complete(app)
    assert kept[0].ttft_ms is None and kept[0].body()["status"] == "failed"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_left_has_a_receipt(path: str, stream: bool) -> None:
    begun = asyncio.Event()

    async def endless(job: Request) -> AsyncIterator[Delta]:
        yield delta(job, 0, b"a")
        begun.set()
        await asyncio.Event().wait()

    app, backend, kept = serve(endless)
    prompt = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}

    async def drive() -> None:
        call = OpenCall(app, path, {**prompt, "stream": stream, "model": "legal"})
        task = call.start()
        if stream:
            await call.sent.get()
            await call.sent.get()
        await begun.wait()
        call.disconnect()
        await backend.closed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(drive())
    assert [receipt.body()["status"] for receipt in kept] == ["aborted"]
    assert kept[0].adapter_cid == named("legal").cid


def test_several_prompts_have_one_receipt_of_the_slowest() -> None:
    quick, slow = RequestFacts("device", 0.0, 1, 0.5, 2), RequestFacts("source", 0.2, 3, 0.1, 5)
    app, _, kept = serve(with_facts(say_hello, quick, slow))
    told = complete(app, ["a", "b"], model="legal").json()["serving"]
    assert len(kept) == 1 and len(told["adapters"]) == 1
    assert (told["tier_found"], told["load_ms"], told["queue_ms"]) == ("source", 200.0, 500.0)
    assert told["completion_tokens"] == 18


def test_facts_of_the_first_are_taken_as_they_are() -> None:
    assert slowest(NO_FACTS, FACTS) is FACTS


def test_a_signed_receipt_is_verified_with_the_public_key() -> None:
    key = Ed25519PrivateKey.generate()
    app, _, kept = serve(key=key)
    told = chat(app).json()["serving"]
    assert check(told, key.public_key()) is Verdict.VALID
    assert check({**told, "status": "failed"}, key.public_key()) is Verdict.CHANGED
    assert kept[0].body() == told


def test_a_reload_between_arrival_and_start_is_what_the_receipt_names() -> None:
    """The receipt is written from what the engine was given, not from what was looked up before."""
    app, backend, kept = serve()
    moved = replace(named("legal"), cid="cidv1:sha256:new")
    encode = backend.codec.encode

    def encode_while_moving(text: str, **options: Any) -> list[int]:
        backend.give_name("legal", moved)
        return encode(text, **options)

    backend.codec.encode = encode_while_moving  # type: ignore[method-assign]
    assert complete(app, model="legal").json()["serving"]["adapter_cid"] == "cidv1:sha256:new"


def test_receipts_of_refused_requests_are_limited() -> None:
    now = 0.0
    kept = Kept()
    budget = RefusalBudget(burst=3, per_second=0.5, clock=lambda: now)
    issuer = ReceiptIssuer(writer=kept, refusals=budget)
    app = make_app(receipts=issuer)
    for _ in range(5):
        assert complete(app, model="nobody").status_code == 404
    assert len(kept) == 3 and issuer.num_dropped == 2
    assert complete(app).status_code == 200 and len(kept) == 4, "answers have theirs"
    now = 2.0
    for _ in range(2):
        complete(app, model="nobody")
    assert len(kept) == 5


def test_receipts_of_a_full_queue_are_limited_too() -> None:
    kept = Kept()
    budget = RefusalBudget(burst=3, per_second=0.5, clock=lambda: 0.0)

    async def refuse(job: Request) -> AsyncIterator[Delta]:
        raise EngineBusy("Full.")
        yield

    app = make_app(ScriptedBackend(refuse), receipts=ReceiptIssuer(writer=kept, refusals=budget))
    answers = [complete(app) for _ in range(5)]
    assert {one.status_code for one in answers} == {429} and len(kept) == 3
    assert ["x-loramux-receipt" in one.headers for one in answers] == [True] * 3 + [False] * 2
