"""Rounds of random faults under traffic: each request is answered rightly or refused.

LORAMUX_FAULT_ROUNDS sets how many rounds (500 for the full run), LORAMUX_FAULT_SEED where chance
begins. The report of the full run is printed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoTokenizer

from loramux.registry.records import ReceiptFilter
from loramux.registry.registry import Registry
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from tests.fault_traffic import NUM_TOKENS, PROMPTS, Answered, Asker, Outcomes, Traffic
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer, running_redis
from tests.registry_scene import BASE, Scene, client_of, push, send
from tests.serve_factory import RunningServer
from tests.small_disk import SmallDisk, read_only, small_disk

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("LORAMUX_FAULT_SEED", "1"))
NUM_ROUNDS = os.environ.get("LORAMUX_FAULT_ROUNDS")
NUM_CLIENTS = 5
NUM_ADAPTERS = 4
NUM_SOURCES = 6
CHECK_EVERY = 10
MOVING = "acme/moving"
PUSHED = "acme/pushed"
DISK_MIB = 96
MAX_GROWTH_MIB = 64
MAX_DESCRIPTORS = 32
"""How many more descriptors the server may have open at one check than at another."""
# Longer than any fault; a server that is not well after it has not healed.
HEAL_S = 60.0


@dataclass
class World:
    """A server, what it should answer, and what can go wrong around it."""

    scene: Scene
    server: RunningServer
    registry_url: str
    disk: SmallDisk | None
    postgres: PostgresServer | None = None
    redis: RedisServer | None = None
    cids: dict[str, str] = field(default_factory=dict)
    """Folder of an adapter -> its CID."""
    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    """Receipts of the answers before the first round."""
    done: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault was made."""

    @property
    def store(self) -> Path:
        return self.scene.data / "store"


@contextmanager
def world_of(folder: Path, *, postgres: PostgresServer | None) -> Iterator[World]:
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk", size_mib=DISK_MIB))
        scene = Scene(folder)
        scene.data = folder / "disk" / "data"
        redis = None
        flags = ["--disk-folder", str(folder / "disk" / "images"), "--registry"]
        if postgres is None:
            url = str(folder / "disk" / "registry.db")
            flags.append(url)
        else:
            url = postgres.new_database()
            redis = stack.enter_context(running_redis())
            flags += [url, "--shared-cache", redis.url]
        checks = {"LORAMUX_CHECK_INTEGRITY": "1"}
        server = stack.enter_context(scene.serving("faults", *flags, environment=checks))
        world = World(scene, server, url, disk, postgres, redis)
        prepare(world)
        yield world


def prepare(world: World) -> None:
    """Make the adapters, push those that requests name, and computes all answers with PEFT."""
    scene = world.scene
    for number in range(NUM_ADAPTERS + NUM_SOURCES):
        world.cids[f"a{number}"] = scene.make_adapter(f"a{number}", seed=number)
    tokenizer = AutoTokenizer.from_pretrained(scene.folder / "model")
    for name, cid in [(None, BASE), *world.cids.items()]:
        model = peft_model(scene, name)
        for prompt in PROMPTS:
            world.texts[cid, prompt] = greedy_text(model, tokenizer, prompt)
    with client_of(world.server) as client:
        for number in range(NUM_ADAPTERS):
            reference = f"acme/a{number}@1.0.0" if number > 1 else f"{MOVING}@{number}.0.0"
            assert push(client, reference, f"a{number}") == world.cids[f"a{number}"]
        for prompt in PROMPTS:
            body = {"model": "acme/a2+0.5*acme/a3", "prompt": prompt, "max_tokens": NUM_TOKENS}
            answer = send(client, "/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
            world.texts["sum", prompt] = answer["choices"][0]["text"]
            world.prepared.add(answer["serving"]["id"])
    world.models = {
        BASE: [BASE],
        "acme/a2": [world.cids["a2"]],
        "acme/a3": [world.cids["a3"]],
        MOVING: [world.cids["a0"], world.cids["a1"]],
        f"{MOVING}@1.0.0": [world.cids["a1"]],
        "acme/a2+0.5*acme/a3": ["sum"],
    }
    assert len({world.texts[cid, PROMPTS[0]] for cid in world.cids.values()}) == len(world.cids)


def peft_model(scene: Scene, name: str | None) -> Any:
    import copy

    from peft import PeftModel

    if name is None:
        return scene.model.eval()
    return PeftModel.from_pretrained(copy.deepcopy(scene.model), scene.adapters / name).eval()


def greedy_text(model: Any, tokenizer: Any, prompt: str) -> str:
    tokens = tokenizer(prompt)["input_ids"]
    num_prompt_tokens = len(tokens)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens = [*tokens, int(logits.argmax())]
    text: str = tokenizer.decode(tokens[num_prompt_tokens:], skip_special_tokens=True)
    return text


class Pusher:
    """Pushes, moves and removes versions of adapters, and knows what was told to be done."""

    def __init__(self, client: httpx2.Client, world: World, outcomes: Outcomes) -> None:
        self._client = client
        self._world = world
        self._outcomes = outcomes
        self._number = 0
        self.told: dict[str, str] = {}
        self.unsure: dict[str, str] = {}
        """Versions that were begun and refused: there or not, but never another content."""

    def work(self, chance: random.Random) -> None:
        kind = chance.choice([self._push, self._push, self._promote, self._promote, self._remove])
        began = time.monotonic()
        try:
            kind(chance)
        except httpx2.HTTPError as error:
            self._outcomes.fault(f"{kind.__name__}: no answer: {error!r}")
        self._outcomes.took(time.monotonic() - began)
        time.sleep(chance.uniform(0, 0.4))

    def _push(self, chance: random.Random) -> None:
        self._number += 1
        source = f"a{NUM_ADAPTERS + chance.randrange(NUM_SOURCES)}"
        version, cid = f"1.{self._number}.0", self._world.cids[source]
        body = {"reference": f"{PUSHED}@{version}", "source": source}
        answer = self._client.post("/v1/adapters", json=body)
        if self._is_done("push", answer):
            self.told[version] = cid
            if answer.json()["cid"] != cid:
                self._outcomes.fault(f"push of {source} has the wrong CID: {answer.text}")
        else:
            self.unsure[version] = cid

    def _promote(self, chance: random.Random) -> None:
        version = f"{chance.randrange(2)}.0.0"
        body = {"version": version}
        self._is_done("promote", self._client.post(f"/v1/adapters/{MOVING}/promote", json=body))

    def _remove(self, chance: random.Random) -> None:
        if len(self.told) < 3:
            return
        version = chance.choice(sorted(self.told))
        cid = self.told.pop(version)
        answer = self._client.delete(f"/v1/adapters/{PUSHED}@{version}")
        if not self._is_done("remove", answer):
            self.unsure[version] = cid

    def _is_done(self, what: str, answer: httpx2.Response) -> bool:
        if answer.status_code == 200:
            self._outcomes.count(what)
            return True
        self._outcomes.count(f"{what} refused {answer.status_code}")
        if answer.status_code not in (429, 503, 507):
            self._outcomes.fault(f"{what}: {answer.status_code} {answer.text[:300]}")
        return False


class Faults:
    """Everything that can go wrong, each as a context in which it does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kinds: dict[str, Callable[[random.Random], AbstractContextManager[Any]]] = {
            "kill engine": self._kill_engine,
            "stop engine": self._stop_engine,
            "stop server": self._stop_server,
            "registry locked": self._lock_registry,
        }
        if world.disk is not None:
            self.kinds["disk full"] = self._fill_disk
        self.kinds["read-only store"] = self._store_read_only
        if world.postgres is not None:
            self.kinds["PostgreSQL restart"] = self._restart_postgres
        if world.redis is not None:
            self.kinds["Redis restart"] = self._restart_redis

    @contextmanager
    def round(self, chance: random.Random) -> Iterator[None]:
        """One to three faults of different kinds, in part at once."""
        names = chance.sample(sorted(self.kinds), chance.choice((1, 1, 2, 3)))
        with ExitStack() as stack:
            for name in names:
                self._world.done[name] += 1
                stack.enter_context(self.kinds[name](chance))
                time.sleep(chance.uniform(0, 0.3))
            yield

    def _engines(self) -> list[int]:
        return self._world.server.engine_pids

    @contextmanager
    def _kill_engine(self, chance: random.Random) -> Iterator[None]:
        for pid in self._engines():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield

    @contextmanager
    def _stop_engine(self, chance: random.Random) -> Iterator[None]:
        """For longer than the watchdog waits, sometimes."""
        pids = self._engines()
        with stopped(pids, chance.choice((0.2, 0.5, 1.0, 6.0))):
            yield

    @contextmanager
    def _stop_server(self, chance: random.Random) -> Iterator[None]:
        with stopped([self._world.server.process.pid], chance.uniform(0.1, 1.5)):
            yield

    @contextmanager
    def _fill_disk(self, chance: random.Random) -> Iterator[None]:
        assert self._world.disk is not None
        with self._world.disk.full():
            time.sleep(chance.uniform(0.2, 2.0))
            yield

    @contextmanager
    def _store_read_only(self, chance: random.Random) -> Iterator[None]:
        with read_only(self._world.store):
            time.sleep(chance.uniform(0.2, 2.0))
            yield

    @contextmanager
    def _lock_registry(self, chance: random.Random) -> Iterator[None]:
        seconds = chance.choice((0.2, 1.0, 3.0))
        if self._world.postgres is None:
            with sqlite_locked(Path(self._world.registry_url)):
                time.sleep(seconds)
        else:
            with postgres_locked(self._world.registry_url):
                time.sleep(seconds)
        yield

    @contextmanager
    def _restart_postgres(self, chance: random.Random) -> Iterator[None]:
        assert self._world.postgres is not None
        self._world.postgres.stop()
        time.sleep(chance.uniform(0, 1.0))
        self._world.postgres.start()
        yield

    @contextmanager
    def _restart_redis(self, chance: random.Random) -> Iterator[None]:
        assert self._world.redis is not None
        self._world.redis.stop()
        time.sleep(chance.uniform(0, 1.0))
        self._world.redis.start()
        yield


@contextmanager
def stopped(pids: list[int], seconds: float) -> Iterator[None]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    yield


@contextmanager
def sqlite_locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path, timeout=HEAL_S, isolation_level=None)
    try:
        with suppress(sqlite3.OperationalError):  # The disk may be full.
            connection.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        connection.close()


@contextmanager
def postgres_locked(url: str) -> Iterator[None]:
    import psycopg

    with suppress(psycopg.OperationalError), psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
        tables = ", ".join(row[0] for row in found)
        connection.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")
        yield
        connection.rollback()
        return
    yield


def wait_until_well(world: World) -> None:
    """Wait for a server that answers, with every adapter, after all faults have ended."""
    deadline = time.monotonic() + HEAL_S
    with httpx2.Client(base_url=world.server.url, timeout=HEAL_S) as client:
        while True:
            health = client.get("/health")
            if health.status_code == 200 and health.json()["status"] == "ready":
                return
            assert time.monotonic() < deadline, health.text
            time.sleep(0.05)


def check_receipts(world: World, outcomes: Outcomes) -> int:
    """Each answer has one receipt with its CID, and no other is there; removes them."""
    seen = outcomes.take_receipts()
    with Registry(world.registry_url) as registry:
        deadline = time.monotonic() + HEAL_S
        while True:
            stored = registry.find_receipts(ReceiptFilter(limit=10_000))
            if seen.keys() <= {one.id for one in stored} or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        ids = [one.id for one in stored]
        for number, receipt_id in (Counter(ids) - Counter(set(ids))).items():
            outcomes.fault(f"receipt {receipt_id} is stored {number} times more")
        for lost in sorted(set(seen) - set(ids)):
            outcomes.fault(f"receipt {lost} of {seen[lost]} is lost")
        for one in stored:
            if one.id in seen:
                check_receipt(world, outcomes, one.cid, seen[one.id])
            elif one.id not in world.prepared:
                outcomes.fault(f"a receipt belongs to no answer: {one.body}")
        registry.prune_receipts(max_count=0)
    return len(stored)


def check_receipt(world: World, outcomes: Outcomes, cid: str | None, answered: Answered) -> None:
    """Check that the text is that of the adapter in the receipt."""
    if "+" in answered.model or not answered.text:
        return
    expected = world.texts[cid or BASE, answered.prompt]
    if not expected.startswith(answered.text):
        outcomes.fault(f"the receipt of {answered} names {cid}")


def check_library(world: World, pusher: Pusher) -> None:
    with Registry(world.registry_url) as registry:
        library = AdapterLibrary(ContentStore(world.store), registry)
        assert library.verify().faults == ()
        names = {info.name for info in registry.adapters()}
        if PUSHED.partition("/")[2] not in names:
            assert not pusher.told
            return
        found = {info.version: info.cid for info in registry.show(PUSHED).versions}
    assert pusher.told.items() <= found.items()
    assert found.items() <= {**pusher.unsure, **pusher.told}.items()


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def run_rounds(world: World, outcomes: Outcomes, num_rounds: int) -> list[tuple[float, int]]:
    """Return the server's memory in MiB and its open descriptors at each check."""
    chance, faults = random.Random(SEED), Faults(world)
    checks: list[tuple[float, int]] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(world.server)) for _ in range(NUM_CLIENTS + 1)]
        askers = [Asker(one, outcomes, world.models, world.texts) for one in clients[1:]]
        pusher = Pusher(clients[0], world, outcomes)
        traffic = Traffic([pusher.work, *(one.ask for one in askers)], SEED)
        with traffic.running():
            for number in range(1, num_rounds + 1):
                with faults.round(chance):
                    pass
                wait_until_well(world)
                time.sleep(chance.uniform(0, 0.5))
                if number % CHECK_EVERY and number != num_rounds:
                    continue
                with traffic.paused():
                    world.done["receipts"] += check_receipts(world, outcomes)
                    check_library(world, pusher)
                    pid = world.server.process.pid
                    checks.append((rss_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))))
                assert not outcomes.faults, "\n".join(outcomes.faults[:20])
    return checks


def check_end(world: World) -> None:
    with client_of(world.server) as client:
        # A stopped engine may be noticed after the last answers: then it is replaced.
        deadline = time.monotonic() + HEAL_S
        while True:
            deep = client.get("/health", params={"deep": "1"})
            stats = client.get("/v1/stats").json()
            if deep.status_code == 200 and (stats["running"], stats["waiting"]) == (0, 0):
                break
            assert time.monotonic() < deadline, (deep.text, stats)
            time.sleep(0.05)
    assert len(world.server.engine_pids) == 1
    log = world.server.log.read_text()
    assert "AssertionError" not in log, "a check of the engine's pages failed"


def report(
    world: World, outcomes: Outcomes, checks: list[tuple[float, int]], seconds: float
) -> str:
    counts = ", ".join(f"{name} {number}" for name, number in sorted(outcomes.counts.items()))
    done = ", ".join(f"{name} {number}" for name, number in sorted(world.done.items()))
    return (
        f"\n{seconds:.0f} s; faults and receipts: {done}\nrequests: {counts}\n"
        f"slowest {outcomes.slowest_s:.1f} s; server's memory (MiB) and descriptors: "
        + " ".join(f"{mib:.0f}/{num_open}" for mib, num_open in checks)
    )


def run(world: World, num_rounds: int) -> str:
    outcomes, began = Outcomes(), time.monotonic()
    checks = run_rounds(world, outcomes, num_rounds)
    check_end(world)
    told = report(world, outcomes, checks, time.monotonic() - began)
    settled = checks[len(checks) // 4 :]
    memory, descriptors = zip(*settled, strict=True)
    assert max(memory) - memory[0] < MAX_GROWTH_MIB, told
    assert max(descriptors) - min(descriptors) < MAX_DESCRIPTORS, told
    return told


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "num_rounds"),
    [
        ("sqlite", 5),
        pytest.param("postgresql", 8, marks=pytest.mark.slow),
        pytest.param("sqlite", 250, marks=pytest.mark.slow),
        pytest.param("postgresql", 250, marks=pytest.mark.slow),
    ],
)
def test_each_request_is_answered_or_refused(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    num_rounds: int,
) -> None:
    postgres = request.getfixturevalue("postgres_server") if kind == "postgresql" else None
    with world_of(tmp_path / "world", postgres=postgres) as world:
        told = run(world, num_rounds if NUM_ROUNDS is None else int(NUM_ROUNDS))
    with capsys.disabled():
        print(told)
    shutil.rmtree(tmp_path / "world", ignore_errors=True)
