"""The supervisor against real engine processes that are stopped, hang, or die during the start."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loramux.backend.host import Health
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import TEXT, AsyncEngine, AsyncEngineOptions
from loramux.errors import EngineDied, EngineStopped
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from loramux.worker import vital_signs
from loramux.worker.process import EngineKind
from loramux.worker.spawn import spawn_worker
from loramux.worker.vital_signs import KillCause
from tests.engine_factory import save_model_with_tokenizer

LIMIT_S = 280


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model_with_tokenizer(folder)
    return folder


def options(model: Path) -> AsyncEngineOptions:
    config = EngineConfig(device="cpu", device_memory_bytes=8 * 2**20, dtype="float32")
    return AsyncEngineOptions(model=model, config=config)


def new_engine(model: Path, kind: EngineKind = TEXT) -> AsyncEngine:
    engine = AsyncEngine(options(model))
    vars(engine)["kind"] = kind
    return engine


def faulty(step_limit_s: float = 120.0) -> EngineKind:
    return EngineKind("tests.faulty_worker", TEXT.replies, step_limit_s)


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
            yield engine
    finally:
        await engine.close(drain_s=0)


async def tokens_of(engine: AsyncEngine, name: str, count: int) -> list[int]:
    request = Request(
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
    )
    return [token async for delta in engine.submit(request) for token in delta.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("stop_s", [3, 5, 20])
def test_no_stream_of_a_stopped_engine_is_lost(model: Path, stop_s: int) -> None:
    """A stop of 5 s lost all of them: the engine was killed after 4 s without a heartbeat."""

    async def check() -> None:
        async with started(new_engine(model)) as engine:
            expected, pid = await tokens_of(engine, "alone", 480), engine.engine_pid
            assert pid is not None
            streams = [
                asyncio.create_task(tokens_of(engine, f"stream {number}", 480))
                for number in range(3)
            ]
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
            ends_s = time.monotonic() + stop_s
            if stop_s > vital_signs.QUIET_S:
                while engine.health is Health.READY:
                    await asyncio.sleep(0.05)
                assert engine.health is Health.STALLED
                with pytest.raises(EngineStopped, match="stalled"):
                    await tokens_of(engine, "refused", 1)
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
            os.kill(pid, signal.SIGCONT)
            assert await asyncio.gather(*streams) == [expected] * 3
            while engine.health is not Health.READY:
                await asyncio.sleep(0.05)
            assert await tokens_of(engine, "later", 480) == expected
            assert (engine.engine_pid, engine.num_restarts) == (pid, 0)
            assert engine.kills.total() == 0

    asyncio.run(check())


@pytest.mark.slow
def test_a_start_goes_on_after_a_stop_of_ten_seconds_in_each_phase(model: Path) -> None:
    async def check() -> None:
        worker = spawn_worker(TEXT.module)
        phases: list[str] = []

        def stop_for_a_while() -> None:
            worker.popen.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(10, worker.popen.send_signal, signal.SIGCONT)

        def on_progress(what: str, share: float) -> None:
            if what not in phases:
                phases.append(what)
                stop_for_a_while()

        engine = AsyncEngine(options(model), on_progress=on_progress, worker=worker)
        stop_for_a_while()  # While it imports libraries.
        async with started(engine):
            assert len(await tokens_of(engine, "answered", 4)) == 4
            assert len(phases) > 1
            assert (engine.engine_pid, engine.num_restarts) == (worker.popen.pid, 0)
            assert engine.kills.total() == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("fault", "limit_s", "cause", "words"),
    [
        ("hang", 1.0, KillCause.HUNG_STEP, "hung in step 1 "),
        pytest.param(
            *("deadlock", 120.0, KillCause.DEADLOCK, "slept in step 1 with all threads"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_engine_that_hangs_is_found_and_says_where(
    fault: str,
    limit_s: float,
    cause: KillCause,
    words: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setattr(vital_signs, "DEADLOCK_S", 2.0)

    async def check() -> None:
        async with started(new_engine(model, faulty(limit_s))) as engine:
            with pytest.raises(EngineStopped, match=words):
                await tokens_of(engine, "hangs", 4)
            assert engine.kills[cause] == engine.kills.total() == 1
            assert engine.health is Health.RESTARTING

    asyncio.run(check())


def test_a_start_that_died_is_repeated_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", str(tmp_path / "has-died"))

    async def check() -> None:
        async with started(new_engine(model, faulty())) as engine:
            assert len(await tokens_of(engine, "answered", 4)) == 4
            assert engine.num_restarts == 1 and engine.kills.total() == 0

    asyncio.run(check())


@pytest.mark.slow
def test_a_start_that_dies_twice_says_how_and_in_which_phase(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "die")

    async def check() -> None:
        engine = new_engine(model, faulty())
        with pytest.raises(EngineDied, match="ended by SIGKILL.* while Preparing CPU kernels"):
            await engine.start()
        assert engine.num_restarts == 1 and engine.kills.total() == 0
        await engine.close(drain_s=0)

    asyncio.run(check())


@pytest.mark.slow
def test_a_start_without_any_sign_of_life_has_a_limit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "stop")
    # More than the imports take, in which the process gives no sign of life either.
    monkeypatch.setattr(vital_signs, "START_LIMIT_S", 15.0)

    async def check() -> None:
        engine = new_engine(model, faulty())
        with pytest.raises(
            EngineDied, match="gave no sign of life for 15 s while Preparing CPU kernels"
        ):
            await engine.start()
        assert engine.kills[KillCause.START] == 1 and engine.num_restarts == 0
        await engine.close(drain_s=0)

    asyncio.run(check())
