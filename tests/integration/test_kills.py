"""kill -9 at random points of push, pull, promote, rollback, remove and gc.

LORAMUX_KILLS sets how often (200 for the full run), LORAMUX_KILL_SEED where chance begins.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import AdapterNotFound
from loramux.registry.registry import Registry
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from tests.kill_worker import ADAPTER
from tests.postgres_server import PostgresServer
from tests.store_factory import write_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("LORAMUX_KILL_SEED", "1"))
NUM_KILLS = os.environ.get("LORAMUX_KILLS")
NUM_SOURCES = 40
MAX_ACTIONS = 8
# A push, the longest action, takes about as many.
MAX_EVENTS = 60
MAX_TOLD = 25

Event = dict[str, Any]


@dataclass
class Expected:
    """What must be there: all that was told to be done."""

    versions: dict[str, str] = field(default_factory=dict)
    prod: str | None = None

    def apply(self, event: Event) -> None:
        name, result = event.get("done"), event.get("result")
        if name == "push":
            assert isinstance(result, list)
            self.versions[result[0]] = result[1]
        elif name in ("promote", "rollback"):
            self.prod = result
        elif name == "remove":
            del self.versions[str(result)]

    def check(self, registry: Registry, unfinished: Event) -> None:
        """Check the state: the last thing begun may be done or not; everything else is just as it
        was told.
        """
        found, prod = read_names(registry)
        begun = unfinished.get("begin")
        changed = set(found.items()) ^ set(self.versions.items())
        assert len(changed) <= (begun in ("push", "remove")), (unfinished, changed)
        if begun == "promote":
            assert prod in (self.prod, unfinished["version"])
        elif begun != "rollback":
            assert prod == self.prod, unfinished
        self.versions, self.prod = found, prod


def read_names(registry: Registry) -> tuple[dict[str, str], str | None]:
    if not registry.adapters():
        return {}, None
    shown = registry.show(ADAPTER)
    prod = [state.targets[0].version for state in shown.aliases]
    return {info.version: info.cid for info in shown.versions}, prod[0] if prod else None


@contextmanager
def worker(root: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kill_worker", str(root), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert next_event(process) == {"ready": True}
        yield process
        assert process.stdin is not None
        process.stdin.close()


def next_event(process: subprocess.Popen[str]) -> Event:
    assert process.stdout is not None
    event: Event = json.loads(process.stdout.readline())
    return event


def run_until_killed(process: subprocess.Popen[str], seed: int) -> list[Event]:
    """Most die at a file operation, every third child wherever the signal meets it."""
    chance = random.Random(seed)
    num_actions = chance.randint(0, MAX_ACTIONS)
    num_events = chance.randint(1, MAX_EVENTS) if seed % 3 else 0
    num_told = chance.randint(1, MAX_TOLD)
    assert process.stdin is not None
    process.stdin.write(f"run {seed} {num_actions} {num_events}\n")
    process.stdin.write("wait\n" if num_events else "")
    process.stdin.flush()
    events: list[Event] = []
    while "dead" not in (event := next_event(process)):
        events.append(event)
        if not num_events and len(events) == num_told:
            process.stdin.write("kill\n")
            process.stdin.flush()
    assert event["dead"] == -9, "a child failed by itself; its traceback is above"
    return events


def check_library(root: Path, url: str, expected: Expected, unfinished: Event) -> None:
    with Registry(url) as registry:
        # A change waits for one whose COMMIT reached the server just before its client died.
        with pytest.raises(AdapterNotFound):
            registry.remove("nobody/nothing")
        library = AdapterLibrary(ContentStore(root / "store"), registry)
        assert library.verify().faults == ()
        expected.check(registry, unfinished)
        for cid in set(expected.versions.values()):
            assert len(list(library.store.materialize(cid).iterdir())) == 2
    for folder in (root / "out").iterdir():
        if not folder.name.startswith("."):
            assert len(list(folder.iterdir())) == 2


def check_leftovers(root: Path, url: str) -> None:
    """One more run of each cleans up after all the dead."""
    with Registry(url) as registry:
        library = AdapterLibrary(ContentStore(root / "store"), registry)
        library.push(root / "sources" / "0", ADAPTER)
        library.pull(ADAPTER, root / "out" / "last")
        library.gc(grace_s=0.0)
        assert set(library.store.cids()) == registry.cids()
        num_blobs = len(list((root / "store" / "blobs").glob("*/*")))
        # All share one config file.
        assert num_blobs == len(registry.cids()) + 1
    assert not list((root / "store" / "staging").iterdir())
    assert not [path for path in (root / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("sqlite", 12),
        pytest.param("postgresql", 10, marks=pytest.mark.slow),
        pytest.param("sqlite", 25, marks=pytest.mark.slow),
    ],
)
def test_whatever_was_told_to_be_done_is_there_after_kill_9(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, num_kills: int
) -> None:
    url = str(tmp_path / "registry.db")
    if kind == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.new_database()
    for number in range(NUM_SOURCES):
        write_tiny(tmp_path / "sources" / str(number), number)
    (tmp_path / "out").mkdir()
    expected = Expected()
    done: set[str] = set()
    with worker(tmp_path, url) as process:
        for seed in range(SEED, SEED + int(NUM_KILLS or num_kills)):
            events = run_until_killed(process, seed)
            for event in events:
                expected.apply(event)
            done |= {event["done"] for event in events if "done" in event}
            check_library(tmp_path, url, expected, unfinished=events[-1] if events else {})
    check_leftovers(tmp_path, url)
    assert {"push", "promote", "gc", "pull"} <= done
