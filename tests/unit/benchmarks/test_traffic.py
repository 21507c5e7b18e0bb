"""Traces on a real engine with a tiny random model and a counting clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.lib.random_weights import SHAPES, RandomAdapters, random_model
from benchmarks.lib.traffic import make_requests, percentile, replay, saturate
from benchmarks.lib.workloads import Arrival
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.errors import AdapterNotFound
from tests.engine_factory import cpu_config
from tests.memory_factory import Clock, InlineExecutor

TINY = {**SHAPES["small"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


@pytest.fixture
def engine() -> Iterator[Engine]:
    import torch

    config = cpu_config(
        dtype="float32",
        device_memory_bytes=8 * 2**20,
        host_memory_bytes=2**40,
        max_sequences=2,
        max_batch_tokens=32,
        prefix_cache=False,
    )
    model = random_model(TINY, torch.float32, std=0.2, device="cpu")
    made = build_engine(model, config, loads=InlineExecutor())
    yield made
    made.close()


def arrivals(count: int, gap_s: float = 0.0) -> list[Arrival]:
    return [Arrival(number * gap_s, number % 2, 16, 3 + number % 3, 2) for number in range(count)]


@pytest.mark.parametrize(("backlog", "ramp"), [(2, 4), (5, 7)])
def test_a_steady_window_excludes_the_ramp_and_the_backlog(
    engine: Engine, backlog: int, ramp: int
) -> None:
    requests = make_requests(arrivals(14), [], vocab_size=engine.vocab_size)
    run = saturate(engine, requests, backlog=backlog, clock=Clock())
    assert run.is_steady
    # The ramp precedes the window, and requests that wait at its end never run.
    assert 12 - ramp <= run.num_done <= 14 - backlog and run.num_output < 28
    assert not engine.has_work
    few = make_requests(arrivals(ramp), [], vocab_size=engine.vocab_size, seed=1)
    assert not saturate(engine, few, backlog=backlog, clock=Clock()).is_steady


def test_distinct_adapters_are_counted_per_step(engine: Engine) -> None:
    cids = RandomAdapters(engine).add([4, 4], "all")
    arrived = [Arrival(0.0, number % 2, 16, 3, 8) for number in range(8)]
    requests = make_requests(arrived, cids, vocab_size=engine.vocab_size)
    assert 1 < saturate(engine, requests, backlog=2, clock=Clock()).mean_adapters <= 2
    base = make_requests(arrived, [], vocab_size=engine.vocab_size, seed=1)
    assert saturate(engine, base, backlog=2, clock=Clock()).mean_adapters == 0


def test_with_too_few_requests_the_window_is_the_whole_run(engine: Engine) -> None:
    requests = make_requests(arrivals(5), [], vocab_size=engine.vocab_size)
    run = saturate(engine, requests, backlog=64, clock=Clock())
    assert (run.is_steady, run.num_done, run.num_output) == (False, 5, 10)
    assert run.num_prompt == sum(len(request.prompt_token_ids) for request in requests)
    assert len(run.ttfts_s) == len(run.gaps_s) == 5


def test_requests_are_added_at_the_times_of_the_trace(engine: Engine) -> None:
    clock, slept = Clock(), []
    trace = arrivals(4, gap_s=100.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    requests = make_requests(trace, [], vocab_size=engine.vocab_size)
    run = replay(engine, trace, requests, clock=clock, sleep=sleep)
    assert run.num_done == 4 and len(slept) == 3
    assert all(wait < 20 for wait in run.ttfts_s), "a latency was measured from another arrival"


def test_random_adapters_share_buffers_and_nothing_else(engine: Engine) -> None:
    adapters = RandomAdapters(engine, num_images=2)
    cids = adapters.add([4, 8, 4, 4], "all")
    host = engine.memory.placement.host
    images = [host.get(cid) for cid in cids]
    buffers = [image.buffer.data_ptr() for image in images if image is not None]
    assert len(set(cids)) == 4 and len(set(buffers)) == 3 and buffers[0] == buffers[3]
    assert "4 adapters" in adapters.note(cids) and "share 3 buffers" in adapters.note(cids)
    assert engine.residency.load_now(cids)
    claims = engine.residency.claims()
    pages = [page for page_ids in claims.values() for page in page_ids]
    assert len(claims) == 4 and len(set(pages)) == len(pages)
    engine.residency.release(cids)
    adapters.forget(cids)
    engine.check_integrity()
    assert len(engine.residency) == 0 and len(host) == 0
    with pytest.raises(AdapterNotFound):
        engine.catalog.get(cids[0])


def test_a_random_adapter_changes_the_logits(engine: Engine) -> None:
    cids = RandomAdapters(engine).add([64, 64], "all")
    prompt = list(range(20))
    base, other = engine.prompt_logits([(prompt, ()), (prompt, ((cids[0], 1.0),))])
    assert (base - other).abs().max() > 1e-4


def test_percentiles_of_few_values() -> None:
    assert percentile([], 99) is None
    assert percentile([2.0], 99) == 2.0
    assert percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)
