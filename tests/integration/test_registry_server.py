"""A real server on a registry: versions move under running streams, and receipts tell the truth.

LORAMUX_STREAMS sets how many streams run (32 for the full run), LORAMUX_RELOADS how often an
adapter is replaced in place (50).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoTokenizer

from loramux.store.store import ContentStore
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import peft_logits, save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

pytestmark = pytest.mark.slow

NUM_STREAMS = int(os.environ.get("LORAMUX_STREAMS", "16"))
NUM_RELOADS = int(os.environ.get("LORAMUX_RELOADS", "30"))
NUM_TOKENS = 6
PROMPTS = ("The quick brown", "def add(a, b):")
NAME = "acme/sql"
LOAD = "/v1/load_lora_adapter"


class World:
    """The model, the adapters' folders by CID, and what PEFT answers with each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_model_with_tokenizer(folder / "model")
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self._store = ContentStore(folder / "cids")
        self._folders: dict[str, Path] = {}
        self.expected = cache(self._expected)

    def make_adapter(self, name: str, seed: int) -> tuple[Path, str]:
        """Its folder and CID."""
        folder = write_adapter(
            self.folder / "adapters" / name,
            lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model"),
            lora_tensors(self.model.config, seed=seed, r=4),
        )
        cid = self._store.put_folder(folder)
        self._folders[cid] = folder
        return folder, cid

    def _expected(self, cid: str, prompt: str) -> str:
        tokens = tuple(self._tokenizer(prompt)["input_ids"])
        num_prompt_tokens = len(tokens)
        for _ in range(NUM_TOKENS):
            logits = peft_logits(self.model, self._folders[cid], tokens)
            tokens += (int(torch.argmax(logits[-1])),)
        text: str = self._tokenizer.decode(tokens[num_prompt_tokens:], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[RunningServer]:
    (world.folder / "adapters").mkdir()
    flags = ["--model", str(world.folder / "model"), "--dtype", "float32"]
    flags += ["--device-memory", "16MiB", "--data", str(world.folder / "data")]
    flags += ["--disk-folder", str(world.folder / "images"), "--prewarm", "0"]
    flags += ["--allow-runtime-lora-updating", "--allowed-roots", str(world.folder / "adapters")]
    flags += ["--pool-id", "test/pool"]
    with running_server(world.folder / "log", *flags) as running:
        yield running


def client_of(server: RunningServer) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def send(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def ask(client: httpx2.AsyncClient, model: str, prompt: str) -> tuple[str, str]:
    """Return the CID in the receipt, and the text."""
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS}
    answer = await send(client, "/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
    told = answer.json()
    assert answer.headers["x-loramux-receipt"] == told["serving"]["id"]
    return told["serving"]["adapter_cid"], told["choices"][0]["text"]


class Stream:
    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.begun = asyncio.Event()
        self.events: list[str] = []
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: httpx2.AsyncClient) -> None:
        body = {"model": NAME, "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
        async with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()

    @property
    def receipt(self) -> dict[str, Any]:
        assert self.events[-1] == "[DONE]", "a stream was broken"
        serving: dict[str, Any] = json.loads(self.events[-2])["serving"]
        return serving


def test_versions_move_under_running_streams_and_no_stream_breaks(
    server: RunningServer, world: World
) -> None:
    cids = {}
    for version, seed in (("1.0.0", 1), ("1.1.0", 2)):
        _, cids[version] = world.make_adapter(f"sql-{version}", seed)
    first, second = cids["1.0.0"], cids["1.1.0"]

    async def use() -> None:
        async with client_of(server) as client:
            for version, cid in cids.items():
                body = {"reference": f"{NAME}@{version}", "source": f"sql-{version}"}
                pushed = (await send(client, "/v1/adapters", body)).json()
                assert pushed["cid"] == cid
            promote, rollback = f"/v1/adapters/{NAME}/promote", f"/v1/adapters/{NAME}/rollback"
            await send(client, promote, {"version": "1.0.0"})
            streams = [Stream(client) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            await send(client, promote, {"version": "1.1.0", "warm": True})
            promoted = await ask(client, NAME, PROMPTS[0])
            later = [Stream(client) for _ in range(4)]
            await asyncio.gather(*(stream.begun.wait() for stream in later))
            await send(client, rollback, {})
            assert not all(stream.task.done() for stream in (*streams, *later))
            rolled_back = await ask(client, NAME, PROMPTS[0])
            by_cid = await ask(client, second, PROMPTS[1])
            await asyncio.gather(*(stream.task for stream in (*streams, *later)))

            assert promoted == (second, world.expected(second, PROMPTS[0]))
            assert rolled_back == (first, world.expected(first, PROMPTS[0]))
            assert by_cid == (second, world.expected(second, PROMPTS[1]))
            assert {stream.receipt["adapter_cid"] for stream in streams} == {first}
            assert {stream.receipt["adapter_cid"] for stream in later} == {second}
            assert {s.receipt["adapters"][0]["alias"] for s in (*streams, *later)} == {"prod"}

    asyncio.run(use())


def test_receipts_of_all_are_kept_and_found(server: RunningServer, world: World) -> None:
    async def use() -> None:
        async with client_of(server) as client:
            body = {"artifact": f"{NAME}@1.0.0", "input": "ticket text...", "max_tokens": 4}
            answer = (await send(client, "/v1/run", body)).json()
            told = answer["serving"]
            assert answer["artifact"] == f"{NAME}@1.0.0"
            assert told["pool_id"] == "test/pool" and told["status"] == "completed"
            assert told["completion_tokens"] == answer["usage"]["completion_tokens"]
            got = await client.get(f"/v1/receipts/{told['id']}")
            assert got.json() == told
            found = await client.get("/v1/receipts", params={"adapter": f"{NAME}@1.0.0"})
            assert found.status_code == 200
            assert {one["adapter_cid"] for one in found.json()["data"]} <= {told["adapter_cid"]}

    asyncio.run(use())


@pytest.mark.slow
def test_reloads_in_place_under_load_answer_with_the_version_of_their_receipt(
    server: RunningServer, world: World
) -> None:
    made = [world.make_adapter(f"rl-{i}", 100 + i) for i in range(NUM_RELOADS + 1)]
    served = world.folder / "adapters" / "rl"
    answers: list[tuple[str, str, str]] = []
    seen_after: list[str] = []

    async def use() -> None:
        async with client_of(server) as client:
            is_done = asyncio.Event()

            async def load(number: int) -> None:
                shutil.copytree(made[number][0], served, dirs_exist_ok=True)
                body = {"lora_name": "rl", "lora_path": "rl", "load_inplace": True}
                answer = await send(client, LOAD, body)
                assert answer.text == "Success: LoRA adapter 'rl' added successfully."

            async def keep_asking(prompt: str) -> None:
                while not is_done.is_set():
                    answers.append((prompt, *await ask(client, "rl", prompt)))

            await load(0)
            askers = [asyncio.create_task(keep_asking(PROMPTS[i % 2])) for i in range(4)]
            for number in range(1, NUM_RELOADS + 1):
                await load(number)
                seen_after.append((await ask(client, "rl", PROMPTS[0]))[0])
            is_done.set()
            await asyncio.gather(*askers)
            entries = (await client.get("/v1/adapters")).json()["data"]
            assert [entry["cid"] for entry in entries if "rl" in entry["names"]] == [made[-1][1]]
            unnamed = [entry for entry in entries if not entry["names"]]
            assert not unnamed, "old versions were not freed"
            unload = await client.post("/v1/unload_lora_adapter", json={"lora_name": "rl"})
            assert unload.text == "Success: LoRA adapter 'rl' removed successfully."

    asyncio.run(use())
    assert seen_after == [cid for _, cid in made[1:]]
    assert len({cid for _, cid, _ in answers} & {cid for _, cid in made}) > 10
    assert len({text for _, _, text in answers}) > 10, "the versions answer alike"
    wrong = [
        (cid, prompt, text, world.expected(cid, prompt))
        for prompt, cid, text in answers
        if text != world.expected(cid, prompt)
    ]
    assert not wrong
