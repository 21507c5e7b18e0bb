"""The autotuner keeps the fastest candidate, and torch's choice where none is clearly faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.runner.gemm import autotune
from loramux.runner.gemm.autotune import (
    Autotuner,
    FusedSwiglu,
    Timing,
    fastest,
    num_cold_weights,
    timed_run,
    torch_gemm,
)
from loramux.runner.gemm.table import TunedGemm
from tests.gemm_factory import FAILS, FakeCublasLt, aligned

SPLIT_ROWS, SPLIT_INPUTS = 160, 256


def tune(library: Any, m: int = 16, k: int = 16, **options: Any) -> TunedGemm:
    weights = [aligned(12, k) for _ in range(2)]
    return Autotuner(library, options.pop("timing", library.timing())).tune(
        aligned(m, k), weights, **options
    )


def test_fastest_algorithm_is_kept() -> None:
    library = FakeCublasLt({1: (b"0.9", b"0.5", b"0.7")})
    entry = tune(library)
    assert (entry.first_m, entry.m, entry.n, entry.k) == (16, 16, 12, 16)
    assert entry.algorithm == b"0.5" and entry.num_splits == 1 and not entry.fused_swiglu
    assert len(library.asked) == 1


@pytest.mark.parametrize("names", [(), (b"1.2",), (b"0.995",), (FAILS,)])
def test_torch_stays_where_nothing_is_clearly_faster(names: tuple[bytes, ...]) -> None:
    assert tune(FakeCublasLt({1: names})).algorithm == b""


def tune_split_k(
    by_splits: dict[int, tuple[bytes, ...]], split_seconds: float = 0.0, m: int = SPLIT_ROWS
) -> tuple[TunedGemm, FakeCublasLt]:
    """split_seconds: what the consumer takes to read each partial sum."""
    library, read = FakeCublasLt(by_splits), list[int]()

    def consumer(y: Tensor) -> Callable[[], None]:
        return lambda: read.append(1 if y.ndim == 2 else len(y))

    def consumed() -> float:
        seconds = split_seconds * (read[0] if read else 0)
        read.clear()
        return seconds

    timing = library.timing(consumed)
    return tune(library, m, SPLIT_INPUTS, consumer=consumer, timing=timing), library


def test_split_k_is_chosen_with_the_time_of_its_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search of GEMMs alone: four splits are the fastest of them."""
    monkeypatch.setattr(autotune, "_NUM_SPLITS", (2, 4, 7, 8))
    by_splits: dict[int, tuple[bytes, ...]] = {1: (b"0.9",), 2: (b"0.8", b"0.6"), 4: (b"0.5",)}
    entry, library = tune_split_k(by_splits)
    assert (entry.num_splits, entry.split_algorithm) == (4, b"0.5")
    assert entry.algorithm == b"0.9"
    assert [s.num_splits for s in library.asked] == [1, 2, 4], "256 / 7 and 256 / 8: not by 64"
    entry, _ = tune_split_k(by_splits, split_seconds=0.1)
    assert (entry.num_splits, entry.split_algorithm) == (2, b"0.6")
    assert tune_split_k(by_splits, split_seconds=0.4)[0].num_splits == 1


@pytest.mark.parametrize("m", [32, 512])
def test_split_k_is_not_tried_for_few_or_many_rows(m: int) -> None:
    assert tune_split_k({2: (b"0.1",)}, m=m)[0].num_splits == 1


@pytest.mark.parametrize(
    ("seconds", "supported", "expected"),
    [(1.2, True, True), (1.499, True, False), (2.0, True, False), (0.1, False, False)],
)
def test_fused_swiglu_is_kept_where_it_is_faster(
    seconds: float, supported: bool, expected: bool
) -> None:
    """GEMM and activation take 1.5 s, the fused kernel `seconds`."""
    ran: list[str] = []
    library = FakeCublasLt({1: (b"0.5",)})

    def measure(run: Callable[[], object]) -> float:
        before = len(ran)
        library.ran.clear()
        run()
        if "fused" in ran[before:]:
            return seconds
        return 1.5 if "activation" in ran[before:] else float((library.ran or [b"1.0"])[0])

    swiglu = FusedSwiglu(
        supports=lambda x, weight: supported,
        fused=lambda x, weight: ran.append("fused"),
        activate=lambda y: ran.append("activation"),
    )
    entry = tune(library, timing=Timing(measure), swiglu=swiglu)
    assert entry.fused_swiglu is expected


def test_a_lucky_first_measurement_does_not_decide() -> None:
    """The finalists run again; a candidate counts with its best time."""
    times = {0: [1.0] * 9, 1: [0.6] + [0.6] * 8, 2: [0.7] + [0.4] * 8}
    turn = {number: iter(values) for number, values in times.items()}
    current = [0]

    def run_number(number: int) -> Callable[[], None]:
        return lambda: current.__setitem__(0, number)

    def measure(run: Callable[[], object]) -> float:
        run()
        return next(turn[current[0]])

    assert fastest({number: run_number(number) for number in times}, Timing(measure)) == 2


def test_consumer_runs_after_each_gemm_and_x_stays() -> None:
    x, weights = torch.randn(2, 4), [torch.randn(3, 4) for _ in range(2)]
    before, y, read = x.clone(), torch.empty(2, 3), list[Tensor]()
    timed_run(torch_gemm, x, weights, y, lambda: read.append(y.clone()))()
    assert torch.equal(x, before)
    torch.testing.assert_close(torch.stack(read), torch.stack([x @ w.t() for w in weights]))


def test_measurements_read_more_than_a_cache_holds() -> None:
    assert num_cold_weights(100 * 2**20) == 2
    assert num_cold_weights(2**30) == 2
    assert num_cold_weights(2**20) == 192


def test_variants_of_the_leaders_are_tried_and_steady_state_decides() -> None:
    """Catches a choice by quick timings alone: clocks are lower on a power-limited GPU."""
    cool = {"torch": 1.0, "slow": 3.0, "fast": 0.5, "fast variant": 0.4, "slow variant": 0.1}
    hot = {"torch": 1.0, "fast": 0.6, "fast variant": 0.9, "slow": 2.0}
    ran, finalists, asked = list[str](), list[str](), list[str]()

    def run_named(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    def quick(run: Callable[[], object]) -> float:
        run()
        return cool[ran[-1]]

    def steady(runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            run()
        finalists[:] = ran[-len(runs) :]
        return [hot[name] for name in finalists]

    class Others:
        def variants(self, leaders: Sequence[str]) -> dict[str, Callable[[], object]]:
            asked.extend(leaders)
            return {name: run_named(name) for name in ("fast", "fast variant")}

        def power_saving(self, name: str) -> float:
            return float(name == "fast variant")

    runs: dict[str, Callable[[], object]] = {
        name: run_named(name) for name in ("torch", "slow", "fast")
    }
    assert fastest(runs, Timing(quick), Others()) == "fast variant"
    assert fastest(runs, Timing(quick, steady), Others()) == "fast"
    assert asked == ["fast", "torch", "slow"] * 2
    assert finalists == ["torch", "fast variant", "fast", "slow"]
    hot["fast variant"] = 0.605
    assert fastest(runs, Timing(quick, steady), Others()) == "fast variant", "and saves power"
    hot.update({"torch": 0.61, "fast variant": 0.608})
    assert fastest(runs, Timing(quick, steady), Others()) == "fast", "no gain over torch"
