"""gate and up with their activation: at once, or by a product and what stands behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.runner.gemm.autotune import Clock
from loramux.runner.gemm.dispatch import Gated, Products
from tests.unit.runner.test_products import ROWS, Library, aligned


def gated_products(
    seconds: float, choices_file: Path | None = None
) -> tuple[Products, list[Tensor], list[str]]:
    """A product and its activation take 1.5 s, all at once `seconds`."""
    weights = [aligned(12, 16) for _ in range(2)]
    ran: list[str] = []

    def at_once(x: Tensor, weight: Tensor) -> Tensor:
        ran.append("at once")
        return F.linear(x, weight)[:, :6]

    def activate(y: Tensor) -> Tensor:
        ran.append("activation")
        return y[:, :6]

    def measure(run: Callable[[], object]) -> float:
        before = len(ran)
        run()
        if "at once" in ran[before:]:
            return seconds
        return 1.5 if "activation" in ran[before:] else 0.5

    library: Any = Library(b"0.5")
    made = Products(
        library,
        [weights],
        choices_file=choices_file,
        clock=Clock(measure),
        gated=Gated(lambda x, weight: len(x) == ROWS, at_once, activate),
    )
    return made, weights, ran


@pytest.mark.parametrize(("seconds", "is_at_once"), [(1.2, True), (1.499, False), (2.0, False)])
def test_gate_and_up_are_at_once_where_that_is_faster(
    tmp_path: Path, seconds: float, is_at_once: bool
) -> None:
    """And the next start knows it, without measuring again."""
    x, choices_file = aligned(ROWS, 16), tmp_path / "gpu.json"
    expected = ["at once"] if is_at_once else []
    for start in range(2):
        made, weights, ran = gated_products(seconds, choices_file)
        assert made.gated(x, weights[1], None) is None, "there was no search yet"
        with made.searching():
            made.gated(x, weights[0], None)
        assert {"at once", "activation"} <= set(ran) if start == 0 else ran == expected
        ran.clear()
        y = made.gated(x, weights[1], None)
        assert ran == expected
        assert (y is not None) == is_at_once
        if y is not None:
            assert torch.equal(y, F.linear(x, weights[1])[:, :6])


def test_gate_and_up_that_do_not_fit_are_not_at_once() -> None:
    """Other rows, a bias, a weight of no family, and a device without a library."""
    made, weights, ran = gated_products(0.1)
    x, bias, stranger = aligned(ROWS, 16), torch.zeros(12).bfloat16(), aligned(12, 16)
    with made.searching():
        assert made.gated(aligned(ROWS + 1, 16), weights[0], None) is None
        assert made.gated(x, weights[0], bias) is None
        assert made.gated(x, stranger, None) is None
        without = Products(None, [weights], gated=made._gated)
        assert without.gated(x, weights[0], None) is None
    assert ran == []


def test_what_was_kept_of_gate_and_up_and_makes_no_sense_is_found_anew(tmp_path: Path) -> None:
    choices_file = tmp_path / "gpu.json"
    choices_file.write_text(json.dumps({"16x12x16 torch.bfloat16 gated-2": "half"}))
    made, weights, _ = gated_products(0.1, choices_file)
    with made.searching():
        assert made.gated(aligned(ROWS, 16), weights[0], None) is not None
    kept = json.loads(choices_file.read_text())
    assert kept["16x12x16 torch.bfloat16 gated-2"] == "at once"
