"""Request traces over many adapters: S-LoRA, Punica, Chameleon, and drifting popularity.

A trace is an endless, seeded iterator of `Arrival`; `first` and `until` take a part of it. The rank
of an adapter follows from its index: `rank_of(index, SLORA_RANKS)`. torch is not imported.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

SLORA_RANKS = (8, 16, 32, 64)
PUNICA_RANKS = (16,)
CHAMELEON_RANKS = (8, 16, 32, 64, 128)
SLORA_TOKENS = (8, 512)
PUNICA_MAX_TOKENS = 2048
# Median and deviation (of the logarithm) that resemble production: long prompts, short outputs.
PROMPT_SHAPE = (1000, 1.0)
OUTPUT_SHAPE = (130, 0.8)
MAX_PROMPT_TOKENS = 4096
MAX_OUTPUT_TOKENS = 1024

Popularity = Literal["identical", "uniform", "skewed", "distinct"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    time_s: float
    adapter: int
    """The index of the adapter."""
    rank: int
    prompt_tokens: int
    output_tokens: int


Trace = Iterator[Arrival]


def first(trace: Trace, num_requests: int) -> list[Arrival]:
    return list(itertools.islice(trace, num_requests))


def until(trace: Trace, duration_s: float) -> list[Arrival]:
    return list(itertools.takewhile(lambda arrival: arrival.time_s < duration_s, trace))


def rank_of(adapter: int, ranks: Sequence[int]) -> int:
    """Return the rank of an adapter; ranks are assigned round-robin."""
    return ranks[adapter % len(ranks)]


def slora(
    *,
    num_adapters: int,
    alpha: float,
    requests_per_s: float,
    cv: float = 1.0,
    tokens: tuple[int, int] = SLORA_TOKENS,
    seed: int = 0,
) -> Trace:
    """Draw S-LoRA's trace: adapter floor(n * power(alpha)), uniform at alpha 1, skewed near 0.

    Gaps are Gamma(1/cv^2, cv^2/rate), lengths uniform in `tokens`, ranks round-robin.
    """
    source = random.Random(seed)
    return _arrivals(
        times=gamma_times(source, requests_per_s=requests_per_s, cv=cv),
        choose=lambda time_s: int(num_adapters * source.random() ** (1 / alpha)),
        ranks=SLORA_RANKS,
        lengths=lambda: (source.randrange(*tokens), source.randrange(*tokens)),
    )


def punica(
    popularity: Popularity,
    *,
    num_requests: int,
    requests_per_s: float,
    max_tokens: int = PUNICA_MAX_TOKENS,
    seed: int = 0,
) -> Trace:
    """Draw Punica's trace; its number of adapters follows from the number of requests."""
    source = random.Random(seed)

    def lengths() -> tuple[int, int]:
        prompt = _clipped(source.lognormvariate(math.log(18), 0.8) - 1, max_tokens - 2)
        return prompt, max(1, source.randrange(max_tokens) - prompt)

    return _arrivals(
        times=gamma_times(source, requests_per_s=requests_per_s),
        choose=_punica_choice(popularity, num_requests, source),
        ranks=PUNICA_RANKS,
        lengths=lengths,
    )


def chameleon(
    *, num_adapters: int = 100, exponent: float = 1.0, requests_per_s: float, seed: int = 0
) -> Trace:
    """Draw Chameleon's trace: uniform ranks, a power law within a rank, Poisson arrivals."""
    source = random.Random(seed)
    num_ranks = len(CHAMELEON_RANKS)
    within_rank = Weighted(zipf_weights(num_adapters // num_ranks, exponent))

    def lengths() -> tuple[int, int]:
        prompt, output = (
            source.lognormvariate(math.log(median), deviation)
            for median, deviation in (PROMPT_SHAPE, OUTPUT_SHAPE)
        )
        return _clipped(prompt, MAX_PROMPT_TOKENS), _clipped(output, MAX_OUTPUT_TOKENS)

    return _arrivals(
        times=gamma_times(source, requests_per_s=requests_per_s),
        choose=lambda time_s: within_rank.draw(source) * num_ranks + source.randrange(num_ranks),
        ranks=CHAMELEON_RANKS,
        lengths=lengths,
    )


def drifting(
    *,
    num_adapters: int,
    requests_per_s: float,
    swap_every_s: float,
    exponent: float = 1.0,
    tokens: tuple[int, int] = SLORA_TOKENS,
    seed: int = 0,
) -> Trace:
    """Draw a trace with drifting Zipf popularity.

    Every `swap_every_s` one of the hottest tenth of adapters swaps its popularity with another.
    """
    source = random.Random(seed)
    zipf = Weighted(zipf_weights(num_adapters, exponent))
    by_popularity = list(range(num_adapters))
    source.shuffle(by_popularity)
    num_hot = max(1, num_adapters // 10)
    next_swap_s = swap_every_s

    def choose(time_s: float) -> int:
        nonlocal next_swap_s
        while time_s >= next_swap_s:
            next_swap_s += swap_every_s
            hot, other = source.randrange(num_hot), source.randrange(num_adapters)
            by_popularity[hot], by_popularity[other] = by_popularity[other], by_popularity[hot]
        return by_popularity[zipf.draw(source)]

    return _arrivals(
        times=gamma_times(source, requests_per_s=requests_per_s),
        choose=choose,
        ranks=SLORA_RANKS,
        lengths=lambda: (source.randrange(*tokens), source.randrange(*tokens)),
    )


def gamma_times(
    source: random.Random, *, requests_per_s: float, cv: float = 1.0
) -> Iterator[float]:
    """Yield arrival times with gaps of mean 1 / requests_per_s and coefficient of variation cv."""
    time_s = 0.0
    while True:
        time_s += source.gammavariate(1 / cv**2, cv**2 / requests_per_s)
        yield time_s


class Weighted:
    """Draws indices in proportion to their weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._sums = list(itertools.accumulate(weights))

    def draw(self, source: random.Random) -> int:
        point = source.random() * self._sums[-1]
        return bisect.bisect_right(self._sums, point, hi=len(self._sums) - 1)


def zipf_weights(count: int, exponent: float) -> list[float]:
    return [(1 + index) ** -exponent for index in range(count)]


def num_skewed_adapters(num_requests: int) -> int:
    """Return the n with 1 + 1.5 + ... + 1.5^(n - 1) = num_requests.

    Each of Punica's skewed adapters is requested 1.5 times as often as the next, the last once.
    """
    return math.ceil(math.log(1 + num_requests / 2) / math.log(1.5))


def _punica_choice(
    popularity: Popularity, num_requests: int, source: random.Random
) -> Callable[[float], int]:
    match popularity:
        case "identical":
            return lambda time_s: 0
        case "distinct":
            indices = itertools.count()
            return lambda time_s: next(indices)
        case "uniform":
            num_adapters = math.ceil(math.sqrt(num_requests))
            return lambda time_s: source.randrange(num_adapters)
        case "skewed":
            geometric = Weighted([1.5**-i for i in range(num_skewed_adapters(num_requests))])
            return lambda time_s: geometric.draw(source)


def _arrivals(
    *,
    times: Iterator[float],
    choose: Callable[[float], int],
    ranks: Sequence[int],
    lengths: Callable[[], tuple[int, int]],
) -> Trace:
    for time_s in times:
        adapter = choose(time_s)
        yield Arrival(time_s, adapter, rank_of(adapter, ranks), *lengths())


def _clipped(value: float, limit: int) -> int:
    return min(max(int(value), 1), limit)
