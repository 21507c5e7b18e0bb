"""The worker in a thread of this process, driven over a socket pair."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.backend.host import EngineStats
from loramux.engine.messages import Add, Events, Finish, Identify, Reply, Start
from loramux.engine.worker import serve
from loramux.types.adapter import AdapterCard
from loramux.worker import step_loop
from loramux.worker.channel import ServerChannel
from loramux.worker.hosted import StatsView
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Failed,
    Pin,
    Prewarm,
    Ready,
    Refused,
    Register,
    RegisterMany,
    Remove,
    Shutdown,
    Verify,
)
from loramux.worker.pulse import Pulse
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import make_request, save_model_with_tokenizer

SETTINGS = {"dtype": "float32", "device_memory_bytes": 4 * 2**20, "pack_weights": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = save_model_with_tokenizer(folder)
    write_adapter(folder / "adapter", lora_config_dict(), lora_tensors(model.config))
    return folder


def converse(
    model: Path, talk: Callable[[ServerChannel], Awaitable[None]], *, shuts_down: bool = True
) -> int:
    """Run the worker against `talk`, and end it with Shutdown or by closing the socket."""
    ours, theirs = socket.socketpair()
    pulse, number = Pulse.create()
    os.close(number)
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(serve(theirs, pulse)))
    thread.start()

    async def run() -> None:
        channel = await ServerChannel.open(ours, Reply)
        channel.send(Start(model=str(model), settings=SETTINGS))
        try:
            await talk(channel)
            if shuts_down:
                channel.send(Shutdown())
                # What the worker still sends must have a reader.
                reading = asyncio.create_task(read_to_end(channel))
                await asyncio.to_thread(thread.join, 30)
                reading.cancel()
        finally:
            channel.close()

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        thread.join(30)
        theirs.close()
    return status[0]


async def read_to_end(channel: ServerChannel) -> None:
    while await channel.receive() is not None:
        pass


async def next_of(channel: ServerChannel, kind: type[Any]) -> Any:
    while not isinstance(reply := await channel.receive(), kind):
        assert reply is not None, f"the worker ended before {kind.__name__}"
    return reply


async def next_stats(channel: ServerChannel, view: StatsView) -> EngineStats:
    while (reply := await next_of(channel, Events)).stats is None:
        view.update(reply.stats, reply.residency)
    view.update(reply.stats, reply.residency)
    return view.current


async def events_until_done(channel: ServerChannel, name: str) -> list[Reply]:
    seen: list[Reply] = []
    while True:
        reply = await next_of(channel, Events)
        seen += [event for event in reply.events if event.request_id == name]
        if seen and seen[-1].finish_reason is not None:
            return seen


def test_the_worker_is_ready_generates_and_shuts_down(folder: Path) -> None:
    async def talk(channel: ServerChannel) -> None:
        ready = (await next_of(channel, Ready)).card
        assert ready.vocab_size == 512 and ready.dtype == "float32" and ready.eos_token_ids
        channel.send(Add(request=make_request("a", (3, 4, 5), max_tokens=3)))
        assert len(await events_until_done(channel, "a")) == 3

    assert converse(folder, talk) == 0


def test_adapters_are_registered_verified_and_removed(folder: Path) -> None:
    async def talk(channel: ServerChannel) -> None:
        await next_of(channel, Ready)
        channel.send(Register(call_id=1, path=str(folder / "adapter")))
        known = (await next_of(channel, Answer)).adapter
        channel.send(Add(request=make_request("a", (3, 4), ((known.cid, 1.0),), max_tokens=2)))
        await events_until_done(channel, "a")
        channel.send(Verify(call_id=2, cid=known.cid))
        assert (await next_of(channel, Answer)).adapter == known
        channel.send(Remove(cid=known.cid))
        channel.send(Verify(call_id=3, cid=known.cid))
        assert (await next_of(channel, Answer)).error.kind == "AdapterNotFound"
        channel.send(Add(request=make_request("b", (3, 4), ((known.cid, 1.0),))))
        assert (await next_of(channel, Refused)).error.kind == "AdapterNotFound"
        channel.send(Register(call_id=4, path=str(folder / "nothing")))
        assert (await next_of(channel, Answer)).error.kind == "AdapterNotFound"

    assert converse(folder, talk, shuts_down=False) in (0, 1)


def test_adapters_are_inspected_identified_and_adopted(folder: Path, tmp_path: Path) -> None:
    paths = tuple(str(path) for path in (folder / "adapter", tmp_path / "nothing"))

    async def identify(channel: ServerChannel) -> None:
        await next_of(channel, Ready)
        channel.send(RegisterMany(call_id=1, paths=paths))
        inspected, missing = (await next_of(channel, Answer)).registrations
        assert missing.error.kind == "AdapterNotFound"
        channel.send(Register(call_id=2, path=paths[0], check="header"))
        answer = await next_of(channel, Answer)
        assert answer.inspected == inspected.inspected and answer.adapter is None
        channel.send(Identify(call_id=3, path=paths[0]))
        cards.append((await next_of(channel, Answer)).adapter)
        assert cards[0] == answer.inspected.identified(cards[0].cid)
        channel.send(Register(call_id=4, path=paths[0], check="header"))
        assert (await next_of(channel, Answer)).adapter == cards[0], "its CID is on record"
        channel.send(RegisterMany(call_id=5, paths=paths, check="full"))
        checked, missing = (await next_of(channel, Answer)).registrations
        assert checked.adapter == cards[0] and missing.error.kind == "AdapterNotFound"

    async def adopt(channel: ServerChannel) -> None:
        await next_of(channel, Ready)
        for card in (cards[0], replace(cards[0], cid="cidv1:sha256:other")):
            channel.send(Adopt(card=card))
            selection = ((card.cid, 1.0),)
            channel.send(Add(request=make_request(card.cid, (3, 4), selection, max_tokens=1)))
            (event,) = await events_until_done(channel, card.cid)
            assert ("no longer holds" in (event.error or "")) == (card is not cards[0])

    cards: list[AdapterCard] = []
    assert converse(folder, identify) == 0
    assert converse(folder, adopt) == 0


def test_the_engine_reports_its_memory_before_it_becomes_idle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches statistics that are zero or stale until the next request."""
    # Every step reports, so that a request which ends within the interval is seen running.
    monkeypatch.setattr(step_loop, "_STATS_INTERVAL_S", 0)

    async def talk(channel: ServerChannel) -> None:
        view = StatsView(EngineStats())
        await next_of(channel, Ready)
        stats = await next_stats(channel, view)
        assert stats.num_pages == stats.num_free_pages > 0
        assert [tier.tier for tier in stats.tiers] == ["device", "host"]
        channel.send(Register(call_id=1, path=str(folder / "adapter")))
        known = (await next_of(channel, Answer)).adapter
        channel.send(Prewarm(cids=(known.cid,)))
        while (await next_stats(channel, view)).tiers[1].used_bytes != known.num_bytes:
            pass
        channel.send(Pin(call_id=2, cid=known.cid, is_pinned=True))
        while (await next_stats(channel, view)).resident_adapters != (known.cid,):
            pass
        channel.send(Remove(cid=known.cid))
        while (await next_stats(channel, view)).resident_adapters:
            pass
        channel.send(Add(request=make_request("long", (3, 4), max_tokens=400)))
        while not (await next_stats(channel, view)).num_running:
            pass
        channel.send(Abort(request_id="long"))
        while (await next_stats(channel, view)).num_running:
            pass

    assert converse(folder, talk) == 0


def test_statistics_are_sent_with_the_last_token_and_not_in_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_STATS_INTERVAL_S", math.inf)

    async def talk(channel: ServerChannel) -> None:
        await next_of(channel, Ready)
        await next_of(channel, Events)
        channel.send(Add(request=make_request("a", (3, 4), max_tokens=60, ignore_eos=True)))
        replies: list[Events] = []
        while not replies or replies[-1].events[-1].finish_reason is None:
            reply = await next_of(channel, Events)
            if reply.events:
                replies.append(reply)
        *others, last = replies
        assert last.stats is not None and last.stats.num_running == 0
        assert len(others) > 1 and all(reply.stats is None for reply in others)
        assert all(reply.residency is None for reply in replies), "nothing was loaded"

    assert converse(folder, talk) == 0


def test_abort_and_finish_take_effect_at_the_next_step(folder: Path) -> None:
    async def talk(channel: ServerChannel) -> None:
        await next_of(channel, Ready)
        channel.send(Add(request=make_request("long", (3, 4), max_tokens=400, n=2)))
        await next_of(channel, Events)
        channel.send(Finish(request_id="long", index=0))
        channel.send(Abort(request_id="long"))
        channel.send(Add(request=make_request("next", (3, 4), max_tokens=2)))
        await events_until_done(channel, "next")
        channel.send(Add(request=make_request("last", (3, 4), max_tokens=1)))
        stats = (await next_of(channel, Events)).stats
        assert stats.num_running == 0 and stats.num_free_pages == stats.num_pages

    converse(folder, talk)


def test_a_bad_model_is_reported_and_ends_the_worker(tmp_path: Path) -> None:
    async def talk(channel: ServerChannel) -> None:
        failed = await next_of(channel, Failed)
        assert failed.error.kind == "UnsupportedModel" and str(tmp_path) in failed.error.message

    assert converse(tmp_path / "nothing", talk) == 1
