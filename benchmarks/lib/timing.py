"""Timing of decode steps by the host's clock and the GPU's, and of CUDA graphs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.lib.machine import Power, PowerMeter
from benchmarks.lib.traffic import make_request
from loramux.engine.engine import Engine
from loramux.engine.gc_control import FullCollections
from loramux.lora.graph_lora import BASE_MODE
from loramux.types.request import Selection

WARM_STEPS = 4
"""Steps after the last prefill that are not timed."""
_NUM_REPLAYS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a decode step."""

    batch: int
    step_s: float
    """From one step to the next, including the host's work."""
    graph_s: float | None
    """The CUDA graph alone, or None without one."""
    context: float
    """Mean tokens of a sequence in the timed steps."""
    prompt_tokens_per_s: float
    drift: float = 1.0
    """Time of the last quarter of steps / the first; below 1 if prefill left the GPU throttled."""
    power: Power | None = None
    """Power and clock of the GPU in the timed steps, or None if unknown."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s


def mean_of(times: Sequence[StepTime]) -> StepTime:
    """Return the mean of several timings of the same steps."""
    graphs = [one.graph_s for one in times if one.graph_s is not None]
    return replace(
        times[0],
        step_s=fmean(one.step_s for one in times),
        graph_s=fmean(graphs) if graphs else None,
    )


def time_decode(
    engine: Engine,
    selections: Sequence[Selection],
    *,
    context: int,
    num_steps: int,
    num_warm: int = WARM_STEPS,
    meter: PowerMeter | None = None,
) -> StepTime:
    """Time decode steps with one sequence per selection, of `context` tokens on average.

    meter: a running meter of the engine's GPU
    """
    batch = len(selections)
    num_prompt = _prompt_length(engine, batch, context, num_warm + num_steps // 2)
    began = time.perf_counter()
    _add(engine, selections, num_prompt, _room(engine, num_prompt))
    tokens: Counter[str] = Counter()
    while len(tokens) < batch:
        _step(engine, tokens)
    prompt_s = time.perf_counter() - began
    for _ in range(num_warm):
        _step(engine, tokens)
    # No synchronization at either end: as much work is in flight at the start as at the end.
    before = tokens.total()
    times, power = _timed_steps(engine, tokens, num_steps, meter)
    seconds = times[-1] - times[0]
    num_tokens = tokens.total() - before
    graph_s = graph_seconds(engine, batch, has_lora=any(selections))
    for number in range(batch):
        engine.abort(_name(number))
    while engine.has_work:
        engine.step()
    return StepTime(
        batch=batch,
        step_s=seconds * batch / num_tokens,
        graph_s=graph_s,
        context=num_prompt + (before + num_tokens / 2) / batch,
        prompt_tokens_per_s=batch * num_prompt / prompt_s,
        drift=drift_of(times),
        power=power,
    )


def _timed_steps(
    engine: Engine, tokens: Counter[str], num_steps: int, meter: PowerMeter | None
) -> tuple[list[float], Power | None]:
    """Return when the first step began and each ended, and the mean power meanwhile."""
    times = [0.0] * (num_steps + 1)
    first = 0 if meter is None else meter.num_samples
    with FullCollections():  # As the server does.
        times[0] = time.perf_counter()
        for number in range(num_steps):
            _step(engine, tokens)
            times[number + 1] = time.perf_counter()
    return times, None if meter is None else meter.mean(first)


def drift_of(times: Sequence[float]) -> float:
    """Compare the last quarter of steps with the first; times[0] is the start of the first step."""
    quarter = max(1, (len(times) - 1) // 4)
    return (times[-1] - times[-1 - quarter]) / (times[quarter] - times[0])


def graph_seconds(engine: Engine, batch: int, *, has_lora: bool) -> float | None:
    """Time the CUDA graph that the batch's steps replay, on the inputs of the last step."""
    runner: Any = engine.executor
    if not getattr(runner, "is_gpu", False):
        return None
    graphs = runner.decode_graphs
    size = min((size for size, _ in graphs.keys if size >= batch), default=None)
    if size is None:
        return None
    # The last step's work list is still on the device.
    _, mode = graphs.last_key
    assert (mode != BASE_MODE) is has_lora
    replay = graphs.graphs.get((size, mode))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_NUM_REPLAYS):
        replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / _NUM_REPLAYS


def spread(cids: Sequence[str], batch: int) -> list[Selection]:
    """Give sequence i the adapter i modulo their number, or the base if there are none."""
    return [((cids[i % len(cids)], 1.0),) if cids else () for i in range(batch)]


def _prompt_length(engine: Engine, batch: int, context: int, num_steps: int) -> int:
    """Choose the prompt length; early sequences have decoded some tokens at the last prefill."""
    num_prompt_steps = batch * context // engine.scheduler.config.max_batch_tokens
    return max(1, context - num_steps - num_prompt_steps // 2)


def _room(engine: Engine, num_prompt: int) -> int:
    return engine.scheduler.config.max_model_len - num_prompt


def _add(engine: Engine, selections: Sequence[Selection], num_prompt: int, room: int) -> None:
    source = random.Random(len(selections))
    for number, selection in enumerate(selections):
        prompt = source.choices(range(engine.vocab_size), k=num_prompt)
        engine.add(make_request(_name(number), prompt, selection, room))


def _step(engine: Engine, tokens: Counter[str]) -> None:
    for event in engine.step():
        assert event.error is None, event.error
        assert event.finish_reason is None, "a sequence ended while it was timed"
        tokens[event.request_id] += 1


def _name(number: int) -> str:
    return f"decode-{number}"


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def replay_times(
    work: Callable[[], object],
    *,
    num_replays: int = 20,
    num_rounds: int = 3,
    reset: Callable[[], None] | None = None,
) -> tuple[torch.cuda.CUDAGraph, float]:
    """Return the graph of `work`, and the mean seconds of a replay in the fastest round."""
    graph = capture(work)
    rounds = []
    for _ in range(num_rounds):
        if reset is not None:
            reset()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(num_replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / 1e3 / num_replays)
    return graph, min(rounds)
