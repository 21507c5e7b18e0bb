from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from loramux.engine.async_engine import TEXT
from loramux.engine.messages import Events, Start
from loramux.errors import AdapterNotFound, EngineStopped, UnsupportedModel
from loramux.worker.messages import Answer, Shutdown, encode_error
from loramux.worker.process import EngineProcess, PendingCalls
from loramux.worker.spawn import spawn_worker
from tests.engine_factory import save_model_with_tokenizer

SETTINGS = {"dtype": "float32", "device_memory_bytes": 4 * 2**20}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_reports_progress_and_readiness_and_ends_on_shutdown(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path)

    async def check() -> None:
        steps: list[str] = []
        start = Start(model=str(tmp_path), settings=SETTINGS)
        process = await EngineProcess.open(TEXT, start, lambda what, share: steps.append(what))
        assert process.card.path == str(tmp_path) and steps
        process.send(Shutdown())
        await process.wait(timeout_s=10)
        assert not is_alive(process.pid)
        assert isinstance(await process.receive(), Events)
        assert await process.receive() is None

    asyncio.run(check())


def test_an_error_at_the_start_is_raised(tmp_path: Path) -> None:
    async def check() -> None:
        with pytest.raises(UnsupportedModel, match="nothing"):
            await EngineProcess.open(
                TEXT,
                Start(model=str(tmp_path / "nothing"), settings=SETTINGS),
                lambda what, share: None,
            )

    asyncio.run(check())


def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path)

    async def check() -> None:
        process = await EngineProcess.open(
            TEXT, Start(model=str(tmp_path), settings=SETTINGS), lambda what, share: None
        )
        os.kill(process.pid, signal.SIGSTOP)
        await process.wait(timeout_s=0.2)
        assert not is_alive(process.pid)

    asyncio.run(check())


def test_answers_resolve_their_own_calls_in_any_order() -> None:
    async def check() -> None:
        calls = PendingCalls()
        (first_id, first), (second_id, second) = calls.open(), calls.open()
        calls.answer(Answer(call_id=second_id))
        calls.answer(Answer(call_id=99))
        assert (await second).call_id == second_id and not first.done()
        calls.answer(Answer(call_id=first_id, error=encode_error(AdapterNotFound("gone"))))
        with pytest.raises(AdapterNotFound, match="gone"):
            await first

    asyncio.run(check())


def test_a_dead_engine_fails_all_pending_calls() -> None:
    async def check() -> None:
        calls = PendingCalls()
        futures = [calls.open()[1] for _ in range(3)]
        futures[0].cancel()
        calls.fail(EngineStopped("dead"))
        for future in futures[1:]:
            with pytest.raises(EngineStopped):
                await future
        with pytest.raises(EngineStopped):
            calls.open()

    asyncio.run(check())


def test_a_spawned_process_that_no_server_takes_is_ended() -> None:
    worker = spawn_worker()
    worker.close()
    assert worker.popen.poll() is not None
