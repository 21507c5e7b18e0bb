"""Run traces on an engine in this process, and measure throughput and latency."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.workloads import Arrival
from loramux.engine.engine import Engine
from loramux.types.request import Request, Selection, TokenEvent
from loramux.types.sampling import SamplingParams

Clock = Callable[[], float]


@dataclass(slots=True, kw_only=True)
class Run:
    """Counts and latencies within the measured window of a run."""

    num_done: int = 0
    num_output: int = 0
    num_prompt: int = 0
    """Prompt tokens of the requests that got their first token."""
    seconds: float = 0.0
    is_steady: bool = False
    """Whether the batch was full during the whole window."""
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_step_adapters: int = 0
    """The sum of distinct adapters in the batch over all steps."""

    @property
    def mean_adapters(self) -> float:
        return self.num_step_adapters / max(1, self.num_steps)

    @property
    def output_per_s(self) -> float:
        return self.num_output / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_done / self.seconds


class Watch:
    """Turns token events into counts and latencies."""

    def __init__(self) -> None:
        self.run = Run()
        self.open: dict[str, Request] = {}
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, request: Request, now: float) -> None:
        self.open[request.request_id] = request
        self._arrived[request.request_id] = now

    def reset(self) -> None:
        """Open a new window; open requests stay open."""
        self.run = Run()

    def step(self, engine: Engine, clock: Clock) -> None:
        """Run one step of the engine and record its events."""
        events = engine.step()
        self.run.num_steps += 1
        self.run.num_step_adapters += engine.scheduler.num_running_adapters
        self.take(events, clock())

    def take(self, events: Iterable[TokenEvent], now: float) -> None:
        for event in events:
            name = event.request_id
            if event.error is not None:
                raise RuntimeError(f"request {name} failed: {event.error}")
            if event.token_id is not None:
                self._take_token(name, now)
            if event.finish_reason is not None:
                del self.open[name]
                self.run.num_done += 1

    def _take_token(self, name: str, now: float) -> None:
        run = self.run
        run.num_output += 1
        if name in self._last:
            run.gaps_s.append(now - self._last[name])
        else:
            run.num_prompt += len(self.open[name].prompt_token_ids)
            run.ttfts_s.append(now - self._arrived[name])
        self._last[name] = now


def make_requests(
    arrivals: Sequence[Arrival], cids: Sequence[str], *, vocab_size: int, seed: int = 0
) -> list[Request]:
    """Make the requests of a trace, for the base if `cids` is empty; the seed draws the prompts."""
    source = random.Random(seed)
    return [
        make_request(
            f"{seed}-{number}",
            tuple(source.choices(range(vocab_size), k=arrival.prompt_tokens)),
            ((cids[arrival.adapter], 1.0),) if cids else (),
            arrival.output_tokens,
        )
        for number, arrival in enumerate(arrivals)
    ]


def make_request(
    name: str, prompt: Sequence[int], selection: Selection, num_output: int
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        selection=selection,
    )


def saturate(
    engine: Engine,
    requests: Sequence[Request],
    *,
    backlog: int,
    clock: Clock = time.perf_counter,
    watch: Watch | None = None,
) -> Run:
    """Run requests with a full batch, while `backlog` requests always wait.

    The window opens when batch and backlog are full, and closes when the last request is added.
    With too few requests for that, the window is the whole run.
    """
    watch = watch or Watch()
    ramp = engine.scheduler.config.max_sequences + backlog
    began = clock()
    is_steady = False
    for number, request in enumerate(requests):
        if number == ramp:
            watch.reset()
            began, is_steady = clock(), True
        engine.add(request)
        watch.add(request, clock())
        while engine.scheduler.num_waiting >= backlog:
            watch.step(engine, clock)
    while watch.open and not is_steady:
        watch.step(engine, clock)
    watch.run.seconds = clock() - began
    watch.run.is_steady = is_steady
    finish(engine, watch)
    return watch.run


def replay(
    engine: Engine,
    arrivals: Sequence[Arrival],
    requests: Sequence[Request],
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Add requests at the times of the trace; the window is the whole run."""
    watch = Watch()
    pending = list(zip(reversed(arrivals), reversed(requests), strict=True))
    began = clock()
    while pending or watch.open:
        now = clock() - began
        while pending and pending[-1][0].time_s <= now:
            arrival, request = pending.pop()
            engine.add(request)
            watch.add(request, began + arrival.time_s)
        if not engine.has_work:
            sleep(max(0.0, pending[-1][0].time_s - now))
            continue
        watch.step(engine, clock)
    watch.run.seconds = clock() - began
    finish(engine, watch)
    return watch.run


def finish(engine: Engine, watch: Watch) -> None:
    """Abort all open requests, and step until the engine is idle."""
    for name in list(watch.open):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    engine.check_integrity()


def percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
