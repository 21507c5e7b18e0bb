"""A folder that its owner replaces again and again while a server loads and stores it."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import httpx2
import pytest

from tests.registry_scene import Scene, client_of

pytestmark = pytest.mark.slow

NUM_CALLS = 150
MAX_HELD_S = 0.05
BROKEN = ("cut", "no adapter_config.json", "no adapter_model.safetensors", "empty")


def break_copy(folder: Path, how: str) -> None:
    for name, number in (("adapter_config.json", 50), ("adapter_model.safetensors", 100)):
        if how == "cut":
            os.truncate(folder / name, number)
        if how == "empty" or how == f"no {name}":
            (folder / name).unlink()


@contextmanager
def flipping(folder: Path, good: Path, broken: list[Path | None]) -> Iterator[None]:
    """Replace a good folder by broken ones in turn, at times by seed; None: there is none."""
    ends, chance = threading.Event(), random.Random(1)

    def flip() -> None:
        for state in cycle(broken):
            for other in (good, state):
                if other is not None:
                    other.rename(folder)
                ends.wait(chance.uniform(0, MAX_HELD_S))
                if other is not None:
                    folder.rename(other)
            if ends.is_set():
                return

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.timeout(600)
def test_loads_of_a_flipping_folder_are_adapters_or_refusals(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.make_adapter("good", seed=1)
    good = scene.adapters / "good"
    states: list[Path | None] = [None]
    for how in BROKEN:
        broken = shutil.copytree(good, tmp_path / how)
        break_copy(broken, how)
        states.append(broken)
    flags = ("--allow-runtime-lora-updating", "--registry", str(tmp_path / "registry.db"))
    folder = scene.adapters / "flip"
    with scene.serving("flipping", *flags) as server, client_of(server) as client:
        seen: Counter[int] = Counter()
        with flipping(folder, good, states):
            for number in range(NUM_CALLS):
                for answer in calls(client, folder, number):
                    seen[answer.status_code] += 1
                    assert answer.status_code < 500, answer.text
        assert seen[200] > 0 and {400, 404, 422} <= seen.keys(), seen
        assert "Traceback" not in server.log.read_text(errors="replace")


def calls(client: httpx2.Client, folder: Path, number: int) -> Iterator[httpx2.Response]:
    body = {"lora_name": "flip", "lora_path": str(folder), "load_inplace": True}
    yield client.post("/v1/load_lora_adapter", json=body)
    reference = f"acme/flip@1.0.{number}"
    yield client.post("/v1/adapters", json={"reference": reference, "source": str(folder)})
    yield client.post("/v1/completions", json={"model": "flip", "prompt": "a", "max_tokens": 1})
