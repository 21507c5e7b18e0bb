"""A process that forks children which use one library until they are killed.

Run as a script: imports once, then forks for each `run SEED NUM_ACTIONS NUM_EVENTS` line of its
input. The children tell what they begin and what they have done, as JSON lines, on the shared
output. After so many actions a child kills itself at so many events; not if that number is 0.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loramux.errors import LoramuxError
from loramux.registry.registry import Registry
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore

ADAPTER = "alice/sql"
MAX_VERSIONS = 12
# Of what Python does to files, processes and databases: the places to die at.
EVENTS = ("open", "os.", "fcntl.", "shutil.", "sqlite3.")


def tell(**event: Any) -> None:
    # One write of less than PIPE_BUF is never torn.
    os.write(1, json.dumps(event).encode() + b"\n")


class Worker:
    def __init__(self, root: Path, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.sources = sorted((root / "sources").iterdir())
        self.out = root / "out"
        self.library = AdapterLibrary(ContentStore(root / "store"), Registry(url))
        self.registry = self.library.registry
        self.seed = seed
        self.num_pulls = 0

    def run(self, num_actions: int, num_events: int) -> None:
        actions: list[Callable[[], Any]] = [
            *(self.push, self.push, self.remove, self.remove, self.gc, self.gc),
            *(self.promote, self.rollback, self.pull),
        ]
        for number in itertools.count():
            if num_events and number == num_actions:
                die_at_event(num_events)
            action = self.random.choice(actions)
            try:
                tell(done=action.__name__, result=action())
            except LoramuxError as error:
                tell(refused=action.__name__, reason=str(error)[:200])

    def versions(self) -> list[str]:
        return [info.version for info in self.registry.show(ADAPTER).versions]

    def push(self) -> list[str]:
        tell(begin="push")
        pushed = self.library.push(self.random.choice(self.sources), ADAPTER)
        return [pushed.version, pushed.cid]

    def promote(self) -> str:
        version = self.random.choice(self.versions())
        tell(begin="promote", version=version)
        self.registry.promote(ADAPTER, version, alias="prod")
        return version

    def rollback(self) -> str:
        tell(begin="rollback")
        return self.registry.rollback(ADAPTER, alias="prod").targets[0].version

    def remove(self) -> str:
        versions = self.versions()
        version = versions[-1] if len(versions) > MAX_VERSIONS else self.random.choice(versions)
        tell(begin="remove", version=version)
        self.registry.remove(f"{ADAPTER}@{version}")
        return version

    def gc(self) -> int:
        tell(begin="gc")
        return self.library.gc(grace_s=0.0).num_files

    def pull(self) -> str:
        tell(begin="pull")
        self.num_pulls += 1
        folder = self.out / f"{self.seed}-{self.num_pulls}"
        return self.library.pull(f"{ADAPTER}@latest", folder).cid


def die_at_event(number: int) -> None:
    left = [number]

    def count(event: str, _: Any) -> None:
        if event.startswith(EVENTS):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def fork_child(root: Path, url: str, seed: int, *numbers: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        Worker(root, url, seed).run(*numbers)
    finally:
        # Only an unforeseen error leads here; the parent sees that this child was not killed.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def main(root: Path, url: str) -> None:
    # What is imported late is then there for all children.
    Registry(url).close()
    tell(ready=True)
    for line in sys.stdin:
        child = fork_child(root, url, *map(int, line.split()[1:]))
        if sys.stdin.readline().strip() == "kill":
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        tell(dead=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
