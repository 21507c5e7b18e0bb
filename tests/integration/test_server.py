"""A real server process over a tiny model: the same answers, honest failures, clean ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from loramux import LLM, LoRARequest, SamplingParams
from loramux.types.residency import Tier, key_of_cid
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.gateway_rules import parse_scrape
from tests.serve_factory import RunningServer, running_server

NUM_ADAPTERS = 32
PROMPTS = ["The quick", "lazy dog", "Stop here, or go on?", "def add(a, b):", "naïve café"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = save_model_with_tokenizer(folder / "model")
    for i in range(NUM_ADAPTERS):
        rank = (1, 2, 4, 8)[i % 4]
        write_adapter(
            folder / f"a{i}",
            lora_config_dict(r=rank, lora_alpha=4 * rank),
            lora_tensors(model.config, seed=i, r=rank),
        )
    (folder / "watched").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    modules = [f"a{i}={folder / f'a{i}'}" for i in range(NUM_ADAPTERS)]
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "16MiB", "--lora-dir", str(folder / "watched")]
    flags += ["--max-num-seqs", "64", "--enable-lora", "--lora-modules", *modules]
    with running_server(folder / "log", *flags) as running:
        yield running


def names() -> list[str]:
    return ["base", *(f"a{i}" for i in range(NUM_ADAPTERS))]


def test_other_servers_apis_give_the_same_text(server: RunningServer, folder: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

    def ask(path: str, **body: Any) -> Any:
        response = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def completion(**fields: Any) -> Any:
        body = {"model": "a1", "prompt": PROMPTS[0], "max_tokens": 8} | options | fields
        return ask("/v1/completions", **body)["choices"][0]

    choice = completion(return_token_ids=True, prompt_logprobs=1)
    expected, token_ids = choice["text"], choice["prompt_token_ids"]
    assert len(choice["prompt_logprobs"]) == len(token_ids)
    assert all(
        str(i) in one for i, one in zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
    )
    parameters = {"max_new_tokens": 8, "ignore_eos_token": True}
    merged = {"merge_strategy": "cat", "ids": ["a1", "a2"], "weights": [1, 0]}
    for asked in ({"adapter_id": "a1"}, {"merged_adapters": merged}):
        lorax = ask("/generate", inputs=PROMPTS[0], parameters=parameters | asked)
        assert lorax == {"generated_text": expected}
    details = parameters | {"adapter_id": "a1", "decoder_input_details": True}
    prefill = ask("/generate", inputs=PROMPTS[0], parameters=details)["details"]["prefill"]
    assert [one["id"] for one in prefill] == token_ids and prefill[0]["logprob"] is None
    sampling = options | {"max_new_tokens": 8}
    sglang = ask("/generate", input_ids=token_ids, lora_path="a1", sampling_params=sampling)
    assert (sglang["text"], sglang["output_ids"]) == (expected, choice["token_ids"])
    lora = [{"id": "a1", "scale": 1}]
    llamacpp = ask("/completion", prompt=PROMPTS[0], n_predict=8, lora=lora, **options)
    assert llamacpp["content"] == expected
    (folder / "watched" / "new").symlink_to(folder / "a1")
    assert completion(model="base:new")["text"] == expected
    assert completion(model="base")["text"] != expected


def test_64_requests_at_once_get_the_texts_of_the_offline_engine(
    server: RunningServer, folder: Path
) -> None:
    cases = [(names()[i % 33], PROMPTS[i % 5] * (1 + i % 3)) for i in range(64)]
    llm = LLM(folder / "model", dtype="float32", device_memory_bytes=16 * 2**20)
    expected = llm.generate(
        [prompt for _, prompt in cases],
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        lora_request=[
            None if name == "base" else LoRARequest(name, 1, str(folder / name))
            for name, _ in cases
        ],
        use_tqdm=False,
    )

    async def ask_all() -> list[str]:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(
                *(
                    complete(client, model=name, prompt=prompt, stream=i % 2 == 0)
                    for i, (name, prompt) in enumerate(cases)
                )
            )

    texts = asyncio.run(ask_all())
    assert texts == [output.outputs[0].text for output in expected]
    assert len(set(texts)) > 40


async def complete(client: httpx2.AsyncClient, *, stream: bool, **body: Any) -> str:
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": stream, **body}
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])
    events = await read_events(client, body)
    assert events[-1] == "[DONE]"
    return "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])


async def read_events(
    client: httpx2.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None
) -> list[str]:
    lines = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if begun is not None:
                begun.set()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_when_the_engine_dies_every_stream_says_so_and_the_server_recovers(
    server: RunningServer,
) -> None:
    async def run() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            restarts = (await client.get("/health")).json()["restarts"]
            body = {"prompt": "The", "max_tokens": 480, "ignore_eos": True, "stream": True}
            begun = {name: asyncio.Event() for name in names()[:16]}
            streams = [
                asyncio.create_task(read_events(client, {**body, "model": name}, event))
                for name, event in begun.items()
            ]
            await asyncio.gather(*(event.wait() for event in begun.values()))
            (pid,) = server.engine_pids
            os.kill(pid, signal.SIGKILL)
            for events in await asyncio.gather(*streams):
                assert events[-1] != "[DONE]", "an answer that was cut looks complete"
                assert "error" in json.loads(events[-1])
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "restarting"
            refused = await client.post("/v1/completions", json={**body, "model": "base"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            await wait_for_health(client)
            assert (await client.get("/health")).json()["restarts"] == restarts + 1
            deep = await client.get("/health", params={"deep": 1})
            assert deep.status_code == 200, deep.text
            assert await complete(client, model="a3", prompt="The", stream=False)

    asyncio.run(run())


async def wait_for_health(client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)


def test_a_client_that_leaves_frees_its_pages(server: RunningServer) -> None:
    async def run() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"model": "a1", "prompt": "The", "max_tokens": 480, "ignore_eos": True}
            for stream in (True, False):
                request = client.post("/v1/completions", json={**body, "stream": stream})
                with pytest.raises((TimeoutError, httpx2.TimeoutException)):
                    await asyncio.wait_for(request, 0.1)
            async with asyncio.timeout(60):
                while await gauge(client, "vllm:num_requests_running") > 0:
                    await complete(client, model="base", prompt="a", stream=False)

    asyncio.run(run())


async def gauge(client: httpx2.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return float(lines[0].rsplit(" ", 1)[1])


def test_sigterm_lets_what_runs_end_and_exits_with_zero(folder: Path, tmp_path: Path) -> None:
    """SIGTERM is sent to every process of the server, as systemd does."""
    flags = ["--model", str(folder / "model"), "--served-model-name", "base"]
    with running_server(tmp_path / "log", *flags, "--device-memory", "16MiB") as running:

        async def run() -> list[str]:
            async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
                body = {"model": "base", "prompt": "The", "max_tokens": 200, "ignore_eos": True}
                begun = asyncio.Event()
                reading = read_events(client, {**body, "stream": True}, begun)
                stream = asyncio.create_task(reading)
                await begun.wait()
                for process in psutil.Process(running.process.pid).children(recursive=True):
                    process.send_signal(signal.SIGTERM)
                running.process.send_signal(signal.SIGTERM)
                return await stream

        events = asyncio.run(run())
        assert events[-1] == "[DONE]"
        assert running.process.wait(60) == 0


@pytest.mark.slow
def test_after_sigterm_new_requests_are_sent_elsewhere_while_what_runs_ends(
    folder: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(folder / "model"), "--served-model-name", "base"]
    with running_server(tmp_path / "log", *flags, "--device-memory", "16MiB") as running:

        async def run() -> list[str]:
            async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
                body = {"model": "base", "prompt": "The", "max_tokens": 480, "ignore_eos": True}
                begun = asyncio.Event()
                reading = read_events(client, {**body, "stream": True, "n": 8}, begun)
                stream = asyncio.create_task(reading)
                await begun.wait()
                running.process.send_signal(signal.SIGTERM)
                health = await client.get("/health")
                while health.status_code == 200:
                    health = await client.get("/health")
                assert health.json()["status"] == "draining"
                refused = await client.post("/v1/completions", json=body)
                assert not stream.done()
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
                assert "shutting down" in refused.json()["error"]["message"]
                assert (await client.get("/version")).status_code == 200
                return await stream

        assert asyncio.run(run())[-1] == "[DONE]"
        assert running.process.wait(60) == 0


@pytest.mark.slow
def test_sigterm_ends_what_takes_too_long_with_an_error_event(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--drain-s", "0"]
    with running_server(tmp_path / "log", *flags, "--device-memory", "16MiB") as running:

        async def run() -> list[str]:
            async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
                body = {"model": "base", "prompt": "The", "max_tokens": 480, "ignore_eos": True}
                begun = asyncio.Event()
                reading = read_events(client, {**body, "stream": True, "n": 8}, begun)
                stream = asyncio.create_task(reading)
                await begun.wait()
                running.process.send_signal(signal.SIGTERM)
                return await stream

        assert "shutting down" in json.loads(asyncio.run(run())[-1])["error"]["message"]
        assert running.process.wait(60) == 0


def test_gateways_parse_a_scrape_and_routers_a_report(server: RunningServer) -> None:
    """The server is busy with other tests of this module before or after."""
    asked = {"model": "a3", "prompt": PROMPTS[0], "max_tokens": 2}
    answer = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    cid = answer.headers["x-loramux-cid"]
    key, report = key_of_cid(cid), {}
    deadline = time.monotonic() + 60
    while report.get("moves", {}).get(key) != Tier.DEVICE and time.monotonic() < deadline:
        report = httpx2.get(f"{server.url}/v1/residency?wait_s=0.2").json()
    assert report["moves"][key] == Tier.DEVICE
    pod = parse_scrape(httpx2.get(f"{server.url}/metrics").text)
    assert pod.affinity("a3") == 1.0 and pod.affinity("never seen") == 0.8
    assert pod.max_adapters > 1 and pod.num_blocks > 0 and pod.block_size > 0
    found = pod.loaded["a3"]
    assert (found.level, found.rank, found.is_pinned) == ("gpu", 8, False)
    assert pod.num_loaded >= 1 and pod.max_loaded == pod.max_adapters
    assert pod.stack_kv_usage == pod.kv_usage and 0 <= pod.stack_hit_rate <= 1
    assert report["state"] == "ready" and report["slots"] >= 1
    assert report["tier_s"][Tier.DEVICE] == 0 < report["tier_s"][Tier.HOST]
    again = {"since": report["generation"], "instance": report["instance"]}
    assert not httpx2.get(f"{server.url}/v1/residency", params=again).json()["full"]


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_behind(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", str(folder / "model"), "--device-memory", "16MiB"]
    with running_server(tmp_path / "log", *flags) as running:
        (pid,) = running.engine_pids
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 60
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(listing.stdout.strip()) and not listing.stdout.startswith("Z")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora-modules", "bad=/nonexistent/adapter"], "No adapter folder"),
        (["--model", "/nonexistent/model"], "/nonexistent/model"),
        (["--device-memory", "lots"], "512MiB"),
    ],
)
def test_what_keeps_it_from_starting_is_said_without_a_traceback(
    flags: list[str], says: str, folder: Path, tmp_path: Path
) -> None:
    model = [] if "--model" in flags else ["--model", str(folder / "model")]
    with (
        pytest.raises(AssertionError, match="did not start") as caught,
        running_server(tmp_path / "log", *model, *flags),
    ):
        pass
    assert says in str(caught.value) and "Traceback" not in str(caught.value)
