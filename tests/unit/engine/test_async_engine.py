"""The real engine process over a tiny model: answers, aborts, deaths and restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from loramux.backend.host import Health
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.engine.messages import Command, Start
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineBusy,
    EngineStopped,
    InvalidRequest,
    RequestTimeout,
    UnsupportedModel,
)
from loramux.types.adapter import InspectedCard
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from loramux.worker import process as process_module
from loramux.worker.channel import ServerChannel
from loramux.worker.messages import Adopt, Prewarm
from loramux.worker.process import EngineKind, EngineProcess
from loramux.worker.spawn import SpawnedWorker, spawn_worker
from tests.adapter_factory import make_peft_adapter, write_adapter
from tests.engine_factory import make_engine, make_prompt, make_request, run_all
from tests.engine_factory import save_model_with_tokenizer as save_model

PROMPT = make_prompt(9, seed=4)
NO_SETTINGS: Mapping[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model(folder)


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peft_adapter(tmp_path_factory.mktemp("adapters") / "one", model, lora_alpha=32)


class EngineRunner:
    """An engine and the event loop on which it runs, for several tests one after another."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any] = NO_SETTINGS, **options: Any
    ) -> None:
        config = EngineConfig(
            device="cpu", device_memory_bytes=8 * 2**20, dtype="float32", **settings
        )
        self.engine = AsyncEngine(AsyncEngineOptions(model=folder, config=config, **options))
        self.runner = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self.run(lambda engine: engine.start())
        except BaseException:
            self.runner.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.run(lambda engine: engine.close(drain_s=0))
        self.runner.close()

    def run(self, use: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(use(self.engine))


@pytest.fixture(scope="module")
def shared(folder: Path, model: Any) -> Iterator[EngineRunner]:
    with EngineRunner(folder) as shared:
        yield shared


def make_greedy(
    name: str, *, cid: str | None = None, timeout_s: float | None = None, **params: Any
) -> Request:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        params=settings,
        selection=() if cid is None else ((cid, 1.0),),
        timeout_s=timeout_s,
    )


async def tokens_of(engine: AsyncEngine, request: Request) -> list[int]:
    return [token async for delta in engine.submit(request) for token in delta.token_ids]


async def wait_until_ready(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
        while engine.health is not Health.READY:
            await asyncio.sleep(0.02)


def test_answers_equal_those_of_the_engine_in_this_process(
    shared: EngineRunner, folder: Path, model: Any, adapter: Path
) -> None:
    local = make_engine(model, folder)
    cid = local.register_adapter(adapter).cid
    base, changed = (
        run_all(local, [make_request("a", PROMPT, selection, ignore_eos=True)])["a"]
        for selection in ((), ((cid, 1.0),))
    )

    async def use(engine: AsyncEngine) -> None:
        card = await engine.add_adapter(str(adapter))
        assert card.cid == cid and engine.adapters[cid] == card
        requests = [make_greedy(str(i), cid=(None, cid)[i % 2]) for i in range(6)]
        answers = await asyncio.gather(*(tokens_of(engine, request) for request in requests))
        assert answers == [base, changed] * 3
        seconds = await engine.probe(30)
        assert set(seconds) == {"generate_s", "adapter_s"}
        await engine.remove_adapter(cid)
        with pytest.raises(AdapterNotFound):
            await tokens_of(engine, make_greedy("gone", cid=cid))

    shared.run(use)


def test_errors_of_one_request_do_not_stop_the_engine(shared: EngineRunner, tmp_path: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(AdapterRefused):
            await engine.add_adapter(str(write_adapter(tmp_path / "bad", "{", None)))
        with pytest.raises(AdapterNotFound):
            await engine.add_adapter(str(tmp_path / "nothing"))
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await tokens_of(engine, make_greedy("bias", logit_bias={99_999: 1.0}))
        with pytest.raises(AdapterNotFound):
            await engine.remove_adapter("never")
        with pytest.raises(RequestTimeout, match="of 480 tokens"):
            await tokens_of(engine, make_greedy("late", max_tokens=480, timeout_s=1e-4))
        assert len(await tokens_of(engine, make_greedy("fine"))) == 8
        assert engine.health is Health.READY and engine.num_restarts == 0

    shared.run(use)


def test_closing_a_stream_aborts_its_request_and_limits_refuse_more(
    folder: Path, model: Any
) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.submit(make_greedy("long", max_tokens=480))
        await anext(stream)
        with pytest.raises(EngineBusy, match="600") as busy:
            await tokens_of(engine, make_greedy("second", max_tokens=120))
        assert busy.value.retry_after_s > 0
        other = engine.submit(make_greedy("fits", max_tokens=80))
        await anext(other)
        with pytest.raises(EngineBusy, match="2 requests"):
            await tokens_of(engine, make_greedy("third", max_tokens=1))
        await other.aclose()
        await stream.aclose()
        await tokens_of(engine, make_greedy("last"))
        assert engine.stats.num_running == 0
        stats = engine.stats
        assert stats.num_free_pages + stats.num_idle_pages == stats.num_pages

    with EngineRunner(folder, {"max_sequences": 2}, max_queue=0, max_tokens=600) as own:
        own.run(use)


def test_a_dead_engine_fails_open_requests_and_is_restarted(
    shared: EngineRunner, adapter: Path
) -> None:
    async def use(engine: AsyncEngine) -> None:
        cid, num_restarts = (await engine.add_adapter(str(adapter))).cid, engine.num_restarts
        before = await tokens_of(engine, make_greedy("before", cid=cid))
        streams = [engine.submit(make_greedy(str(i), max_tokens=480)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineStopped, match="not complete: .* ended by SIGKILL"):
                async for _ in stream:
                    pass
        assert engine.health is Health.RESTARTING
        with pytest.raises(EngineStopped, match="restarting"):
            await tokens_of(engine, make_greedy("too early"))
        await wait_until_ready(engine)
        assert await tokens_of(engine, make_greedy("after", cid=cid)) == before
        assert engine.num_restarts == num_restarts + 1

    shared.run(use)


@pytest.mark.slow
def test_a_new_engine_learns_adapters_by_need_and_loads_the_hot_ones_first(
    folder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start fails once, and an adapter is removed before the engine is back."""
    paths = [make_peft_adapter(tmp_path / str(i), model, lora_alpha=8 + i) for i in range(4)]
    open_process, sent = EngineProcess.open, list[Command]()

    async def open_later(
        kind: EngineKind, start: Start, on_progress: Any, worker: Any
    ) -> EngineProcess[Any, Any]:
        opened.append(start)
        if len(opened) == 1:
            raise OSError("no process is left")
        process = await open_process(kind, start, on_progress, worker)
        monkeypatch.setattr(process, "send", lambda one: (sent.append(one), send(process, one)))
        return process

    send, opened = EngineProcess.send, list[Start]()

    async def use(engine: AsyncEngine) -> None:
        cids = [(await engine.add_adapter(str(path))).cid for path in paths]
        before = [await tokens_of(engine, make_greedy(f"b{c}", cid=c)) for c in cids[:3]]
        await engine.pin_adapter(cids[1], True)
        monkeypatch.setattr(EngineProcess, "open", open_later)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        while engine.health is Health.READY:
            await asyncio.sleep(0.01)
        await engine.remove_adapter(cids[2])
        await wait_until_ready(engine)
        assert len(opened) == 2 and engine.num_restarts == 1
        assert await tokens_of(engine, make_greedy("first", cid=cids[0])) == before[0]
        with pytest.raises(AdapterNotFound):
            await tokens_of(engine, make_greedy("gone", cid=cids[2]))
        async with asyncio.timeout(60):
            while len([one for one in sent if isinstance(one, Adopt)]) < 3:
                await asyncio.sleep(0.01)
        adopted = [one.card.cid for one in sent if isinstance(one, Adopt)]
        assert sorted(adopted) == sorted({*cids} - {cids[2]}), "each once, and none removed"
        assert adopted[-1] == cids[3], "the one that was never used comes last"
        prewarmed = [one.cids for one in sent if isinstance(one, Prewarm)]
        assert prewarmed == [(cids[1], cids[0])]
        pinned = {use.cid for use in await engine.adapter_uses() if use.is_pinned}
        assert pinned == {cids[1]}
        await engine.remove_adapter(cids[0])

    with EngineRunner(folder) as own:
        own.run(use)


@pytest.mark.slow
def test_no_failure_of_a_restart_is_the_last_attempt(
    folder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead process cannot be ended, then no descriptor is left, then the new one dies."""
    paths = [make_peft_adapter(tmp_path / str(i), model, lora_alpha=8 + i) for i in range(2)]
    open_channel, spawned = ServerChannel.open, list[SpawnedWorker]()

    def spawn(module: str) -> SpawnedWorker:
        spawned.append(spawn_worker(module))
        return spawned[-1]

    async def open_later(connection: socket.socket, replies: Any) -> ServerChannel:
        if len(spawned) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        if len(spawned) == 2:
            spawned[-1].popen.kill()
        return await open_channel(connection, replies)

    async def cannot_kill(process: EngineProcess[Any, Any], cause: str) -> None:
        monkeypatch.setattr(EngineProcess, "kill", kill)
        await kill(process, cause)
        raise OSError(errno.EMFILE, "Too many open files")

    kill = EngineProcess.kill

    async def use(engine: AsyncEngine) -> None:
        cids = [(await engine.add_adapter(str(path))).cid for path in paths]
        for cid in cids:
            await engine.pin_adapter(cid, True)
        monkeypatch.setattr(process_module, "spawn_worker", spawn)
        monkeypatch.setattr(ServerChannel, "open", open_later)
        monkeypatch.setattr(EngineProcess, "kill", cannot_kill)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        while engine.health is Health.READY:
            await asyncio.sleep(0.01)
        await wait_until_ready(engine)
        # Removed while pins are restored.
        await engine.remove_adapter(cids[0])
        assert [one.popen.poll() for one in spawned] == [-signal.SIGKILL, -signal.SIGKILL, None]
        assert engine.num_restarts == 2, "one died before it was ready"
        async with asyncio.timeout(20):
            expected = [(cids[1], True)]
            while [(u.cid, u.is_pinned) for u in await engine.adapter_uses()] != expected:
                await asyncio.sleep(0.01)
        assert list(engine.adapters) == [cids[1]]

    with EngineRunner(folder) as own:
        own.run(use)


def test_headers_are_checked_in_batches_and_weights_are_read_on_demand(
    shared: EngineRunner, adapter: Path, tmp_path: Path
) -> None:
    async def use(engine: AsyncEngine) -> None:
        bad = str(write_adapter(tmp_path / "bad", "{", None))
        num_known = len(engine.adapters)
        fresh = shutil.copytree(adapter, tmp_path / "fresh")
        found = await engine.inspect_adapters([str(fresh), bad] * 40)
        card = found[0]
        assert isinstance(card, InspectedCard) and found[::2] == [card] * 40
        assert {getattr(one, "code", None) for one in found[1::2]} == {"config_not_json"}
        assert len(engine.adapters) == num_known
        known = await engine.add_adapter(card.path)
        assert (known.rank, known.num_bytes) == (card.rank, card.num_bytes)
        assert await engine.inspect_adapters([card.path]) == [known], "its CID is on record now"

    shared.run(use)


def test_a_deep_check_goes_on_with_another_adapter_if_one_is_broken(
    shared: EngineRunner, adapter: Path, model: Any, tmp_path: Path
) -> None:
    async def use(engine: AsyncEngine) -> None:
        broken = shutil.copytree(adapter, tmp_path / "broken")
        cids = [(await engine.add_adapter(str(broken))).cid]
        (broken / "adapter_config.json").unlink()
        assert (await engine.probe(30)).keys() == {"generate_s", "broken_adapters"}
        other = make_peft_adapter(tmp_path / "other", model, lora_alpha=3)
        cids.append((await engine.add_adapter(str(other))).cid)
        seconds = await engine.probe(30)
        assert seconds["broken_adapters"] == 1 and seconds["adapter_s"] > 0
        for cid in cids:
            await engine.remove_adapter(cid)

    shared.run(use)


def test_closing_drains_running_requests_and_refuses_new_ones(folder: Path, model: Any) -> None:
    async def use(engine: AsyncEngine) -> None:
        running = asyncio.create_task(tokens_of(engine, make_greedy("running", max_tokens=60)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(drain_s=30))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="draining"):
            await tokens_of(engine, make_greedy("late"))
        assert len(await running) == 60
        await closing
        assert engine.health is Health.STOPPED

    with EngineRunner(folder) as own:
        own.run(use)


@pytest.mark.slow
def test_a_model_that_cannot_be_served_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"), EngineRunner(tmp_path):
        pass
