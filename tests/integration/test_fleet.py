"""Three servers behind a router: kills, drains, pauses and roll-outs under traffic."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import PeftModel

from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.fleet_factory import RunningFleet, running_fleet

pytestmark = pytest.mark.slow

NUM_ADAPTERS = 60
NUM_CLIENTS = 8
NUM_TOKENS = 10
PROMPT = [5, 6, 7, 8]
REFUSALS = (429, 502, 503, 504)


@dataclass
class Scene:
    folder: Path
    expected: dict[str, list[int]] = field(default_factory=dict)
    """The greedy tokens of PEFT by name."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("fleet")
    model = save_model_with_tokenizer(folder / "model")
    paths = {f"a{i}": folder / "adapters" / f"a{i}" for i in range(NUM_ADAPTERS)}
    for seed, path in enumerate(paths.values()):
        config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model")
        write_adapter(path, config, lora_tensors(model.config, seed=seed))
    scene = Scene(folder, {"base": greedy(model)})
    tuned: Any = None
    for name, path in paths.items():
        if tuned is None:
            tuned = PeftModel.from_pretrained(model, str(path), adapter_name=name)
        else:
            tuned.load_adapter(str(path), adapter_name=name)
        tuned.set_adapter(name)
        scene.expected[name] = greedy(tuned)
    assert len({tuple(tokens) for tokens in scene.expected.values()}) > NUM_ADAPTERS // 2
    return scene


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    tokens = list(PROMPT)
    model.eval()
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def fleet(scene: Scene) -> Iterator[RunningFleet]:
    folder = scene.folder
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "8MiB", "--prewarm", "0", "--drain-s", "10"]
    flags += ["--data", str(folder / "data"), "--allowed-roots", str(folder)]
    modules = [f"{name}={folder / 'adapters' / name}" for name in scene.expected if name != "base"]
    with running_fleet(folder, 3, [*flags, "--lora-modules", *modules]) as running:
        yield running


class Traffic:
    """Clients that ask for random adapters and check every answer."""

    def __init__(self, url: str, expected: dict[str, list[int]]) -> None:
        self._url = url
        self._expected = expected
        self._names = list(expected)
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.is_on = True

    async def run(self, count: int) -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client, seed) for seed in range(count)))

    async def _ask_on(self, client: httpx2.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        while self.is_on:
            # Some are asked for far more often than others.
            name = self._names[int(len(self._names) * rng.random() ** 2)]
            body = {
                "model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, "stream": rng.random() < 0.5,
            }  # fmt: skip
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    content = await answer.aread()
                self._check(name, answer, content, is_stream=bool(body["stream"]))
            except httpx2.HTTPError as error:
                self.faults.append(f"{name}: cut with {error!r}")
            if answer.status_code != 200:
                await asyncio.sleep(0.2)

    def _check(
        self, name: str, answer: httpx2.Response, content: bytes, *, is_stream: bool
    ) -> None:
        if answer.status_code in REFUSALS and "retry-after" in answer.headers:
            self.outcomes["refused"] += 1
        elif answer.status_code != 200:
            self.faults.append(f"{name}: {answer.status_code} {content[:300]!r}")
        elif is_stream:
            self._check_stream(name, content.decode())
        else:
            tokens = json.loads(content)["choices"][0]["token_ids"]
            self._compare(name, tokens, is_whole=True)
            self.outcomes["complete"] += 1

    def _check_stream(self, name: str, text: str) -> None:
        events = [one.removeprefix("data: ") for one in text.strip().split("\n\n")]
        is_done = events[-1] == "[DONE]"
        is_error = not is_done and '"error"' in events[-1]
        if not (is_done or is_error):
            self.faults.append(f"{name}: a stream was cut silently after {events[-1][:200]}")
            return
        chunks = [json.loads(event) for event in events[:-1]]
        tokens = [t for one in chunks for c in one["choices"] for t in c.get("token_ids") or ()]
        self._compare(name, tokens, is_whole=is_done)
        self.outcomes["complete" if is_done else "ended with an error event"] += 1

    def _compare(self, name: str, tokens: list[int], *, is_whole: bool) -> None:
        expected = self._expected[name]
        if tokens != (expected if is_whole else expected[: len(tokens)]):
            self.faults.append(f"{name}: {tokens} instead of {expected}")


def test_no_answer_is_cut_or_wrong_while_servers_are_killed_drained_and_paused(
    scene: Scene, fleet: RunningFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, drained, paused = fleet.replicas

    async def work() -> Traffic:
        traffic = Traffic(fleet.url, scene.expected)
        asking = asyncio.create_task(traffic.run(NUM_CLIENTS))
        await asyncio.sleep(2)
        killed.kill()
        restart = asyncio.create_task(asyncio.to_thread(killed.start))
        await asyncio.sleep(1)
        paused.signal(signal.SIGSTOP)
        await asyncio.sleep(6)
        paused.signal(signal.SIGCONT)
        await restart
        await asyncio.to_thread(fleet.wait_until_ready, 3)
        drained.signal(signal.SIGTERM)
        assert await asyncio.to_thread(drained.server.process.wait, 30) == 0
        await asyncio.to_thread(drained.start)
        await asyncio.to_thread(fleet.wait_until_ready, 3)
        await asyncio.sleep(1)
        traffic.is_on = False
        await asking
        return traffic

    traffic = asyncio.run(work())
    with capsys.disabled():
        print(f"\nfleet under faults: {dict(traffic.outcomes)}")
    assert not traffic.faults, traffic.faults[:5]
    assert traffic.outcomes["complete"] > 100


def test_the_metrics_of_the_router_tell_of_the_faults(fleet: RunningFleet) -> None:
    text = httpx2.get(f"{fleet.url}/metrics").text
    assert 'loramux_router:answers_total{replica="http://127.0.0.1' in text
    assert 'tier="device"' in text


def test_after_a_settled_roll_out_nothing_answers_with_the_old_version(
    scene: Scene, fleet: RunningFleet
) -> None:
    name, paths = "acme/pirate", [str(scene.folder / "adapters" / f"a{i}") for i in (1, 2)]
    versions = {}
    with httpx2.Client(base_url=fleet.url, timeout=60) as client:
        for number, path in enumerate(paths, 1):
            body = {"reference": f"{name}@{number}.0.0", "source": path}
            pushed = client.post("/v1/adapters", json=body)
            assert pushed.status_code == 200, pushed.text
            versions[f"{number}.0.0"] = pushed.json()["cid"]

        def promote(version: str) -> httpx2.Response:
            change = {"version": version, "warm": True}
            return client.post(f"/v1/adapters/{name}/promote", json=change)

        first = promote("1.0.0").json()
        assert first["settled"], first

    async def served(client: httpx2.AsyncClient, **fields: Any) -> str:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | fields
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cid = answer.headers["x-loramux-cid"]
        assert answer.json()["serving"]["adapter_cid"] == cid
        return cid

    async def work() -> None:
        async with httpx2.AsyncClient(base_url=fleet.url, timeout=60) as client:
            body = {"model": name, "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
            asked = client.build_request("POST", "/v1/completions", json=body | {"stream": True})
            old = await client.send(asked, stream=True)
            assert old.headers["x-loramux-cid"] == versions["1.0.0"]
            is_on, seen = True, list[str]()

            async def ask_on() -> None:
                while is_on:
                    seen.append(await served(client))

            asking = [asyncio.create_task(ask_on()) for _ in range(4)]
            refused = await client.post(
                f"/v1/adapters/{name}/promote", json={"version": "9.0.0", "warm": True}
            )
            assert refused.status_code == 404
            assert await served(client) == versions["1.0.0"]
            change = {"version": "2.0.0", "warm": True}
            told = (await client.post(f"/v1/adapters/{name}/promote", json=change)).json()
            assert told["settled"] and len(told["replicas"]) == 3
            after = [await served(client) for _ in range(20)]
            assert set(after) == {versions["2.0.0"]}
            is_on = False
            await asyncio.gather(*asking)
            assert set(seen) <= set(versions.values())
            # The stream that began before ends on what it began with.
            assert b"[DONE]" in await old.aread()

    asyncio.run(work())
