from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from loramux.engine.messages import Events, Shutdown, Start
from loramux.engine.process import EngineProcess
from loramux.errors import UnsupportedModel
from tests.engine_factory import save_model_with_tokenizer

SETTINGS = {"dtype": "float32", "device_memory_bytes": 4 * 2**20}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_life_from_ready_to_shutdown_with_progress(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path)

    async def live() -> None:
        steps: list[str] = []
        start = Start(model=str(tmp_path), settings=SETTINGS)
        process = await EngineProcess.open(start, lambda what, share: steps.append(what))
        assert process.ready is not None and process.ready.path == str(tmp_path) and steps
        process.send(Shutdown())
        await process.wait(timeout_s=10)
        assert not is_alive(process.pid)
        assert isinstance(await process.receive(), Events)
        assert await process.receive() is None

    asyncio.run(live())


def test_what_kept_it_from_starting_is_raised_and_no_process_stays(tmp_path: Path) -> None:
    async def live() -> None:
        with pytest.raises(UnsupportedModel, match="nothing"):
            await EngineProcess.open(
                Start(model=str(tmp_path / "nothing"), settings=SETTINGS), lambda what, share: None
            )

    asyncio.run(live())


def test_a_process_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path)

    async def live() -> None:
        process = await EngineProcess.open(
            Start(model=str(tmp_path), settings=SETTINGS), lambda what, share: None
        )
        os.kill(process.pid, signal.SIGSTOP)
        await process.wait(timeout_s=0.2)
        assert not is_alive(process.pid)

    asyncio.run(live())
