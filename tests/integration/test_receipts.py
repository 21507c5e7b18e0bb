"""Mixed requests on one server: each receipt names what was asked for, and all are kept.

LORAMUX_RECEIPTS sets how many (1000 for the full run).
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from loramux.registry.records import ReceiptFilter
from loramux.registry.registry import Registry
from tests.registry_scene import BASE, Scene, client_of, push, send
from tests.serve_factory import RunningServer

NUM_REQUESTS = int(os.environ.get("LORAMUX_RECEIPTS", "120"))
NUM_CLIENTS = 8
GIVEN = ("red", "green", "blue")
NAME = "acme/sql"

Ask = Callable[[httpx2.Client, str, str], dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    kind: str
    model: str
    cid: str | None
    version: str | None = None


@dataclass(frozen=True)
class Known:
    server: RunningServer
    choices: list[Asked]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    scene = Scene(tmp_path_factory.mktemp("scene"))
    given = {name: scene.make_adapter(name, seed=i) for i, name in enumerate(GIVEN)}
    versions = {f"1.{i}.0": scene.make_adapter(f"v{i}", seed=10 + i) for i in range(3)}
    modules = [f"{name}={scene.adapters / name}" for name in GIVEN]
    with scene.serving("receipts", "--lora-modules", *modules) as server:
        with client_of(server) as client:
            for number, version in enumerate(versions):
                push(client, f"{NAME}@{version}", f"v{number}")
            send(client, f"/v1/adapters/{NAME}/promote", {"version": "1.1.0"})
        choices = [Asked("base", BASE, None)]
        choices += [Asked("name", name, cid) for name, cid in given.items()]
        choices += [Asked("version", f"{NAME}@{v}", cid, v) for v, cid in versions.items()]
        choices += [Asked("alias", f"{NAME}@prod", versions["1.1.0"], "1.1.0")]
        choices += [Asked("cid", cid, cid) for cid in versions.values()]
        yield Known(server, choices)


def ask_whole(client: httpx2.Client, model: str, prompt: str) -> dict[str, Any]:
    told: dict[str, Any] = send(client, "/v1/completions", completion(model, prompt))["serving"]
    return told


def ask_chat(client: httpx2.Client, model: str, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": 2, "stream": True}
    return last_event(client, "/v1/chat/completions", body)


def ask_stream(client: httpx2.Client, model: str, prompt: str) -> dict[str, Any]:
    return last_event(client, "/v1/completions", {**completion(model, prompt), "stream": True})


def completion(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 2}


def last_event(client: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    told: dict[str, Any] = json.loads(events[-2])["serving"]
    return told


def ask_all(known: Known) -> list[tuple[Asked, dict[str, Any]]]:
    source = random.Random(6)
    ways: list[Ask] = [ask_whole, ask_stream, ask_chat]
    work = [
        (source.choice(known.choices), source.choice(ways), f"Ticket {number}")
        for number in range(NUM_REQUESTS)
    ]
    with client_of(known.server) as client, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        told = clients.map(lambda one: (one[0], one[1](client, one[0].model, one[2])), work)
        return list(told)


@pytest.mark.slow
def test_each_receipt_of_mixed_requests_names_what_was_asked_for_and_all_are_kept(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ask_all(known)
    for asked, told in answers:
        assert told["adapter_cid"] == asked.cid, asked
        assert told["status"] == "completed" and told["completion_tokens"] in (1, 2)
        used = [(one["cid"], one.get("version")) for one in told["adapters"]]
        # A content id has no version; it was asked for by itself.
        assert used == ([] if asked.cid is None else [(asked.cid, asked.version)]), asked
    by_id = {told["id"]: told for _, told in answers}
    assert len(by_id) == NUM_REQUESTS, "two answers share a receipt"
    assert kept_receipts(known) == by_id
    with capsys.disabled():
        print(f"\n{NUM_REQUESTS} receipts: {dict(Counter(asked.kind for asked, _ in answers))}")


def kept_receipts(known: Known) -> dict[str, Any]:
    """Read from the registry's own file, once the server has stopped."""
    known.server.process.terminate()
    known.server.process.wait(60)
    with Registry(known.server.log.parent / "data" / "registry.db") as registry:
        found = registry.find_receipts(ReceiptFilter(limit=2 * NUM_REQUESTS))
    return {receipt.id: dict(receipt.body) for receipt in found}
