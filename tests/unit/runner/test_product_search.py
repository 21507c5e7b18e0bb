from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loramux.runner.gemm.autotune import Clock, fastest, run_of, some_of, with_torch


def test_a_lucky_first_measurement_does_not_decide() -> None:
    """The finalists run again; what was slow once and fast later counts with its best."""
    times = {0: [1.0] * 9, 1: [0.6] + [0.6] * 8, 2: [0.7] + [0.4] * 8}
    turn = {number: iter(values) for number, values in times.items()}
    current = [0]

    def run_number(number: int) -> Callable[[], None]:
        return lambda: current.__setitem__(0, number)

    def measure(run: Callable[[], None]) -> float:
        run()
        return next(turn[current[0]])

    assert fastest({number: run_number(number) for number in times}, Clock(measure)) == 2


def test_what_reads_a_product_runs_behind_each_and_x_stays() -> None:
    x, weights = torch.randn(2, 4), [torch.randn(3, 4) for _ in range(2)]
    before, y, read = x.clone(), torch.empty(2, 3), list[Tensor]()
    run_of(with_torch, x, weights, y, lambda: read.append(y.clone()))()
    assert torch.equal(x, before)
    torch.testing.assert_close(torch.stack(read), torch.stack([x @ w.t() for w in weights]))


def test_few_large_weights_fill_a_cache_as_well() -> None:
    """Catches a measurement that would need more weights than fit, or only one."""
    family = [torch.empty(1, dtype=torch.uint8).expand(3, 100 * 2**20) for _ in range(4)]
    assert [len(weight) for weight in some_of(family, 1)] == [1, 1]
    assert len(some_of([torch.empty(4, 8)] * 3, 2)) == 3


def test_variations_of_the_leaders_are_tried_and_the_last_word_is_of_a_hot_card() -> None:
    """Catches a choice by looks alone: what is fastest for a moment may be slow when it is hot."""
    cool = {"torch": 1.0, "slow": 3.0, "fast": 0.5, "fast, other": 0.4, "slow, other": 0.1}
    hot = {"torch": 1.0, "fast": 0.6, "fast, other": 0.9, "slow": 2.0}
    ran, settled, asked = list[str](), list[str](), list[str]()

    def run_named(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    def look(run: Callable[[], None]) -> float:
        run()
        return cool[ran[-1]]

    def settle(runs: Sequence[Callable[[], None]]) -> list[float]:
        for run in runs:
            run()
        settled.extend(ran[-len(runs) :])
        return [hot[name] for name in settled]

    class Others:
        def vary(self, leaders: Sequence[str]) -> dict[str, Callable[[], None]]:
            asked.extend(leaders)
            return {name: run_named(name) for name in ("fast", "fast, other")}

        def frugality(self, name: str) -> float:
            return float(name == "fast, other")

    runs = {name: run_named(name) for name in ("torch", "slow", "fast")}
    assert fastest(runs, Clock(look), Others()) == "fast, other"
    assert fastest(runs, Clock(look, settle), Others()) == "fast"
    assert asked == ["fast", "torch", "slow"] * 2
    assert settled == ["torch", "fast, other", "fast", "slow"]
    hot["fast, other"] = 0.605
    settled.clear()
    assert fastest(runs, Clock(look, settle), Others()) == "fast, other", "as fast, and frugal"
    hot.update({"torch": 0.61, "fast, other": 0.608})
    settled.clear()
    assert fastest(runs, Clock(look, settle), Others()) == "fast", "the frugal one is no gain"
