"""Full garbage collections run while the engine is idle, and no request depends on one."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.engine.gc_control import FullCollections
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.model_factory import tiny_transformers_model
from tests.unit.scheduler.scheduler_factory import World


class FakeCollector:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threshold = (700, 10, 10)
        self.count = (0, 0, 0)
        self.num_blocks = 1000

    def collect(self) -> int:
        self.calls.append("collect")
        self.count = (0, 0, 0)
        return 0

    def freeze(self) -> None:
        self.calls.append("freeze")

    def unfreeze(self) -> None:
        self.calls.append("unfreeze")

    def get_count(self) -> tuple[int, int, int]:
        return self.count

    def get_threshold(self) -> tuple[int, int, int]:
        return self.threshold

    def set_threshold(self, first: int, second: int, third: int, /) -> None:
        self.threshold = (first, second, third)


def collections(fake: FakeCollector, *, owns_process: bool = False) -> FullCollections:
    return FullCollections(
        owns_process=owns_process, collector=fake, count_blocks=lambda: fake.num_blocks
    )


def test_automatic_full_collections_are_off_inside_the_context_only() -> None:
    fake = FakeCollector()
    with collections(fake):
        assert fake.threshold[:2] == (700, 10)
        assert fake.threshold[2] > 1_000_000
    assert fake.threshold == (700, 10, 10)
    assert fake.calls == []


def test_objects_from_before_the_context_are_frozen_if_it_owns_the_process() -> None:
    fake = FakeCollector()
    with collections(fake, owns_process=True):
        assert fake.calls == ["collect", "freeze"]
    assert fake.calls[2:] == ["unfreeze"]


def test_the_threshold_is_restored_after_an_error() -> None:
    fake = FakeCollector()
    with pytest.raises(RuntimeError, match="broken"), collections(fake, owns_process=True):
        raise RuntimeError("broken")
    assert fake.threshold == (700, 10, 10) and fake.calls[-1] == "unfreeze"


def test_an_idle_engine_collects_only_when_python_would_have() -> None:
    fake = FakeCollector()
    with collections(fake) as controller:
        fake.count = (5, 5, 9)
        controller.while_idle()
        assert fake.calls == []
        fake.count = (5, 5, 10)
        controller.while_idle()
        controller.while_idle()
        assert fake.calls == ["collect"]


def test_a_busy_engine_collects_when_memory_has_doubled() -> None:
    """Catches unbounded growth of a server that is never idle, and collections every few steps."""
    fake = FakeCollector()
    with collections(fake) as controller:
        fake.num_blocks = 2000
        for _ in range(5000):
            controller.after_step()
        assert fake.calls == []
        fake.num_blocks = 2001
        for _ in range(5000):
            controller.after_step()
        assert fake.calls == ["collect"]


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_the_gc_module_can_be_controlled() -> None:
    before = gc.get_threshold()
    with FullCollections(owns_process=True) as controller:
        assert gc.get_freeze_count() > 0
        controller.after_step()
        controller.while_idle()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_request_leaves_no_cycle_in_scheduler_and_prefix_cache(no_collections: None) -> None:
    """Catches reference cycles, which would leak without full collections."""
    source = random.Random(0)
    world = World(num_pages=40, check_every=10**9)
    gc.collect()
    for number in range(200):
        tokens = [source.randrange(50) for _ in range(source.randrange(1, 20))]
        cid, salt = f"x{number % 7}", str(number % 50)
        world.add(str(number), tokens, cid=cid, cache_salt=salt, max_tokens=5)
        world.step()
        if number % 9 == 0:
            world.scheduler.abort(str(number))
    world.run()
    assert world.prefixes is not None and world.prefixes.num_evicted_pages > 100
    assert gc.collect() == 0


def test_a_request_leaves_no_cycle_in_the_engine(tmp_path: Path, no_collections: None) -> None:
    model = tiny_transformers_model("llama")
    folder = write_adapter(tmp_path / "adapter", lora_config_dict(), lora_tensors(model.config))
    engine = make_engine(model, tmp_path / "model", device_memory_bytes=2**20)
    cid = engine.register_adapter(folder).cid

    def run(numbers: range) -> None:
        for number in numbers:
            selection = ((cid, 1.0),) if number % 2 else ()
            engine.add(make_request(str(number), make_prompt(20, number), selection))
            while engine.has_work:
                engine.step()

    run(range(4))
    gc.collect()
    run(range(4, 24))
    num_unreachable = gc.collect()
    engine.close()
    assert num_unreachable == 0
