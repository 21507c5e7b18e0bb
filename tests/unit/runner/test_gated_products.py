"""gate and up with their activation: at once, or by a product and what stands behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.runner.product_search import Clock
from loramux.runner.products import Gated, Products
from tests.unit.runner.test_products import ROWS, Library, aligned


def gated_products(
    seconds: float, choices_file: Path | None = None
) -> tuple[Products, list[Tensor], list[str]]:
    """A product and its activation take 1.5 s, all at once `seconds`."""
    weights, ran = [aligned(12, 16) for _ in range(2)], []

    def at_once(x: Tensor, weight: Tensor, activation: str) -> Tensor:
        ran.append("at once")
        return activate(F.linear(x, weight), activation)

    def activate(y: Tensor, activation: str) -> Tensor:
        ran.append(activation)
        return y[:, :6]

    def measure(run: Callable[[], object]) -> float:
        ran.clear()
        run()
        return seconds if "at once" in ran else 0.5 + 1.0 * bool(ran)

    gated = Gated(lambda x, weight: len(x) == ROWS, at_once, activate)
    clock = Clock(measure)
    made = Products(
        Library(b"0.5"),  # type: ignore[arg-type]
        [weights],
        choices_file=choices_file,
        clock=clock,
        gated=gated,
    )
    return made, weights, ran


@pytest.mark.parametrize(("seconds", "is_at_once"), [(1.2, True), (1.499, False), (2.0, False)])
def test_gate_and_up_are_at_once_where_that_is_faster(
    tmp_path: Path, seconds: float, is_at_once: bool
) -> None:
    """And the next start knows it."""
    x, choices_file = aligned(ROWS, 16), tmp_path / "gpu.json"
    for start in range(2):
        made, weights, ran = gated_products(seconds, choices_file)
        assert made.gated(x, weights[1], None, "silu") is None, "there was no search yet"
        with made.searching():
            made.gated(x, weights[0], None, "silu")
        assert start == 0 or len(ran) <= 2, "it was measured again"
        ran.clear()
        y = made.gated(x, weights[1], None, "silu")
        assert ran == (["at once", "silu"] if is_at_once else [])
        if is_at_once:
            assert y is not None
            assert torch.equal(y, F.linear(x, weights[1])[:, :6])


def test_gate_and_up_that_do_not_fit_are_not_at_once() -> None:
    """Other rows, a bias, a weight of no family, and a device without a library."""
    made, weights, ran = gated_products(0.1)
    x, bias, stranger = aligned(ROWS, 16), torch.zeros(12).bfloat16(), aligned(12, 16)
    with made.searching():
        assert made.gated(aligned(ROWS + 1, 16), weights[0], None, "silu") is None
        assert made.gated(x, weights[0], bias, "silu") is None
        assert made.gated(x, stranger, None, "silu") is None
        without = Products(None, [weights], gated=made._gated)
        assert without.gated(x, weights[0], None, "silu") is None
    assert ran == []


def test_what_was_kept_of_gate_and_up_and_makes_no_sense_is_found_anew(tmp_path: Path) -> None:
    choices_file = tmp_path / "gpu.json"
    choices_file.write_text(json.dumps({"16x12x16 torch.bfloat16 silu": "half"}))
    made, weights, _ = gated_products(0.1, choices_file)
    with made.searching():
        assert made.gated(aligned(ROWS, 16), weights[0], None, "silu") is not None
    kept = json.loads(choices_file.read_text())
    assert kept["16x12x16 torch.bfloat16 silu"] == "at once"
