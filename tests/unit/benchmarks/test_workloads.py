from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.lib.workloads import (
    CHAMELEON_RANKS,
    SLORA_RANKS,
    Trace,
    chameleon,
    drifting,
    first,
    num_skewed_adapters,
    punica,
    rank_of,
    slora,
    until,
)

TRACES: dict[str, Callable[[int], Trace]] = {
    "slora": lambda seed: slora(num_adapters=50, alpha=0.3, requests_per_s=5, cv=4, seed=seed),
    "punica": lambda seed: punica("skewed", num_requests=100, requests_per_s=5, seed=seed),
    "chameleon": lambda seed: chameleon(requests_per_s=5, seed=seed),
    "drifting": lambda seed: drifting(num_adapters=50, requests_per_s=5, swap_every_s=1, seed=seed),
}


@pytest.mark.parametrize("make", TRACES.values(), ids=TRACES)
def test_a_seed_fixes_the_trace_and_another_seed_changes_it(make: Callable[[int], Trace]) -> None:
    arrivals = first(make(1), 200)
    assert arrivals == first(make(1), 200) != first(make(2), 200)
    times = [arrival.time_s for arrival in arrivals]
    assert times == sorted(times) and times[0] >= 0
    assert all(a.prompt_tokens >= 1 and a.output_tokens >= 1 for a in arrivals)


def test_until_ends_before_the_duration() -> None:
    arrivals = until(slora(num_adapters=5, alpha=1, requests_per_s=10), 20.0)
    assert 100 < len(arrivals) < 300 and arrivals[-1].time_s < 20.0


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_slora_gaps_have_the_given_mean_and_variation(cv: float) -> None:
    times = [
        a.time_s for a in first(slora(num_adapters=5, alpha=1, requests_per_s=10, cv=cv), 40000)
    ]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) / mean == pytest.approx(cv, rel=0.1)


def test_slora_popularity_is_uniform_at_alpha_1_and_skewed_to_the_first_near_0() -> None:
    def shares(alpha: float) -> Counter[int]:
        return Counter(
            a.adapter for a in first(slora(num_adapters=100, alpha=alpha, requests_per_s=1), 20000)
        )

    uniform, skewed = shares(1.0), shares(0.1)
    assert max(uniform.values()) < 300 and len(uniform) == 100
    # P(index 0) = P(u^(1 / alpha) < 1 / n) = n^-alpha
    assert skewed[0] / 20000 == pytest.approx(100**-0.1, rel=0.05)


def test_slora_lengths_and_ranks_are_those_of_the_paper() -> None:
    arrivals = first(slora(num_adapters=100, alpha=1, requests_per_s=1), 5000)
    lengths = [a.prompt_tokens for a in arrivals] + [a.output_tokens for a in arrivals]
    assert min(lengths) >= 8 and max(lengths) <= 511
    assert statistics.fmean(lengths) == pytest.approx(259.5, rel=0.03)
    assert all(a.rank == rank_of(a.adapter, SLORA_RANKS) for a in arrivals)
    assert {a.rank for a in arrivals} == set(SLORA_RANKS)


def test_punica_popularities_differ_in_the_number_of_adapters() -> None:
    def counts(popularity: str) -> Counter[int]:
        trace = punica(popularity, num_requests=400, requests_per_s=1)  # type: ignore[arg-type]
        return Counter(a.adapter for a in first(trace, 400))

    assert counts("identical") == {0: 400}
    assert set(counts("distinct").values()) == {1} and len(counts("distinct")) == 400
    assert len(counts("uniform")) == 20
    assert num_skewed_adapters(400) == 14


def test_punica_skewed_adapters_are_each_half_as_popular_again_as_the_next() -> None:
    trace = punica("skewed", num_requests=1000, requests_per_s=1)
    counts = Counter(a.adapter for a in first(trace, 30000))
    for index in range(4):
        assert counts[index] / counts[index + 1] == pytest.approx(1.5, rel=0.1)


def test_chameleon_ranks_are_equally_likely_and_the_first_of_a_rank_the_most_popular() -> None:
    arrivals = first(chameleon(num_adapters=100, requests_per_s=1), 20000)
    by_rank = Counter(a.rank for a in arrivals)
    assert set(by_rank) == set(CHAMELEON_RANKS)
    assert all(count == pytest.approx(4000, rel=0.1) for count in by_rank.values())
    adapters = Counter(a.adapter for a in arrivals if a.rank == 8)
    assert len(adapters) == 20
    assert adapters[0] / adapters[5] == pytest.approx(2.0, rel=0.15)


def test_a_drifting_trace_changes_the_popular_adapters() -> None:
    def shared_hot(swap_every_s: float) -> int:
        """Count the ten most popular adapters of the first half that are so in the second."""
        trace = drifting(num_adapters=200, requests_per_s=10, swap_every_s=swap_every_s)
        arrivals = first(trace, 10000)
        halves = (arrivals[:5000], arrivals[5000:])
        hot = [{k for k, _ in Counter(a.adapter for a in h).most_common(10)} for h in halves]
        return len(hot[0] & hot[1])

    assert shared_hot(1e9) >= 8
    assert shared_hot(5.0) <= 5
