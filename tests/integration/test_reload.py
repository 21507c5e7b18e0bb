"""A name that moves to new weights: no answer mixes two versions, in weights or in KV."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.backend.text import Delta
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.server.naming.names import AdapterNames
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import make_prompt, peft_logits, save_model_with_tokenizer

NAME = "served"
PREFIX = make_prompt(48, seed=1)
# Long enough to be still running when the new weights have been read.
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model_with_tokenizer(folder)


def make_request(number: int, *, cid: str, max_tokens: int) -> Request:
    """Make requests that begin with the same three pages and end differently."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompt = (*PREFIX, *make_prompt(5, seed=number))
    return Request(
        request_id=f"{number}", prompt_token_ids=prompt, params=params, selection=((cid, 1.0),)
    )


class Reader:
    """Reads one answer; `begun` is set with its first tokens."""

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.num_reused = 0
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: AsyncEngine) -> None:
        async for delta in engine.submit(self.request):
            self._take(delta)

    def _take(self, delta: Delta) -> None:
        self.begun.set()
        self.token_ids += delta.token_ids
        self.num_reused += delta.num_reused or 0


async def read_all(engine: AsyncEngine, cid: str, numbers: range) -> list[Reader]:
    readers = [Reader(engine, make_request(n, cid=cid, max_tokens=12)) for n in numbers]
    await asyncio.gather(*(reader.task for reader in readers))
    return readers


def are_of(readers: list[Reader], model: Any, adapter: Path) -> list[bool]:
    """Whether PEFT would choose the same tokens, each after those before it."""
    return [_is_of(reader, model, adapter) for reader in readers]


def _is_of(reader: Reader, model: Any, adapter: Path) -> bool:
    prompt, answer = reader.request.prompt_token_ids, tuple(reader.token_ids)
    assert len(answer) == reader.request.params.max_tokens
    logits = peft_logits(model, adapter, prompt + answer)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.amax(dim=1) - chosen < 1e-3).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_place",
    [True, False],
    ids=["same folder", "another folder"],
)
def test_answers_after_a_reload_are_the_new_weights_and_those_in_flight_the_old(
    in_place: bool, folder: Path, model: Any, tmp_path: Path
) -> None:
    old = make_peft_adapter(tmp_path / "old", model, seed=1, lora_alpha=32)
    new = make_peft_adapter(tmp_path / "new", model, seed=2, lora_alpha=32)
    served = shutil.copytree(old, tmp_path / "served")

    async def use(engine: AsyncEngine) -> None:
        names = AdapterNames(engine)
        old_cid = (await names.load(NAME, str(served))).cid
        await read_all(engine, old_cid, range(1))
        (cached,) = await read_all(engine, old_cid, range(1, 2))
        assert cached.num_reused == len(PREFIX)

        requests = [make_request(n, cid=old_cid, max_tokens=NUM_TOKENS) for n in range(10, 14)]
        running = [Reader(engine, request) for request in requests]
        await running[0].begun.wait()
        if in_place:
            shutil.copytree(new, served, dirs_exist_ok=True)
        new_cid = (await names.load(NAME, str(served if in_place else new))).cid
        assert list(engine.adapters) == [new_cid]
        assert not all(reader.task.done() for reader in running), "none was running"
        after = await read_all(engine, new_cid, range(20, 23))
        later = await read_all(engine, new_cid, range(30, 31))
        await asyncio.gather(*(reader.task for reader in running))

        assert after[0].num_reused == 0, "the old weights' KV was taken"
        assert later[0].num_reused == len(PREFIX)
        assert are_of([cached, *running], model, old) == [True] * 5
        assert are_of(after + later, model, new) == [True] * 4
        assert not any(are_of(after + later, model, old))
        (known,) = await engine.adapter_uses()
        assert known.cid == new_cid, "the old version was not freed"

    asyncio.run(with_engine(folder, use))


async def with_engine(folder: Path, use: Any) -> None:
    # Few sequences and no waiting time: running requests also wait, or are preempted.
    config = EngineConfig(
        device="cpu",
        device_memory_bytes=8 * 2**20,
        dtype="float32",
        max_sequences=3,
        max_wait_s=0.0,
    )
    engine = AsyncEngine(AsyncEngineOptions(model=folder, config=config))
    await engine.start()
    try:
        await use(engine)
    finally:
        await engine.close(drain_s=0)
