"""GEMMs go to the small-M kernel, to a tuned algorithm, or to torch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.runner.gemm import dispatch
from loramux.runner.gemm.dispatch import (
    GemmDispatcher,
    SmallMGemm,
    open_cublaslt,
    open_dispatcher,
    open_small_m,
)
from loramux.runner.gemm.table import TunedGemm, TunedTable
from tests.gemm_factory import FakeCublasLt, aligned

ROWS, OUTPUTS, INPUTS = 16, 12, 16


def make(
    by_splits: dict[int, tuple[bytes, ...]], *, has_table: bool = True, **entry: Any
) -> tuple[GemmDispatcher, FakeCublasLt]:
    library: Any = FakeCublasLt(by_splits)
    shape: dict[str, Any] = {"first_m": 9, "m": ROWS, "n": OUTPUTS, "k": INPUTS}
    table = TunedTable("gpu", library.version)
    if entry:
        table.add([TunedGemm(**shape, dtype=torch.bfloat16, **entry)])
    return GemmDispatcher(library, table if has_table else None), library


def test_tuned_shapes_run_their_algorithm() -> None:
    gemms, library = make({1: (b"0.5",)}, algorithm=b"0.5")
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    for _ in range(2):
        assert torch.equal(gemms.linear(x, weight), F.linear(x, weight))
    out = torch.empty(ROWS, OUTPUTS, dtype=torch.bfloat16)
    assert gemms.linear(x, weight, out=out) is out
    assert torch.equal(out, F.linear(x, weight))
    assert library.ran == [b"0.5"] * 3


def test_rows_outside_the_tuned_range_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "TUNED_ROWS", range(1, 100))
    gemms, library = make({1: (b"0.5",)}, algorithm=b"0.5")
    weight = aligned(OUTPUTS, INPUTS)
    for num_rows, ran in ((8, 0), (9, 1), (ROWS, 1), (ROWS + 1, 0)):
        library.ran.clear()
        x = aligned(num_rows, INPUTS)
        assert torch.equal(gemms.linear(x, weight), F.linear(x, weight))
        assert len(library.ran) == ran, num_rows


@pytest.mark.parametrize("algorithm", [b"", b"0.4"])
def test_default_and_invalid_algorithms_go_to_torch(algorithm: bytes) -> None:
    """An algorithm that the library refuses for the shape is not run."""
    gemms, library = make({1: (b"0.5",)}, algorithm=algorithm)
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    assert torch.equal(gemms.linear(x, weight), F.linear(x, weight))
    assert library.ran == []


def test_what_the_library_cannot_take_goes_to_torch() -> None:
    """Catches a wrong answer for strided rows, biases, float32 and other weights."""
    gemms, library = make({1: (b"0.5",)}, algorithm=b"0.5")
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    bias = torch.randn(OUTPUTS).to(torch.bfloat16)
    strided = aligned(ROWS, 2 * INPUTS)[:, :INPUTS]
    assert torch.equal(gemms.linear(strided, weight), F.linear(strided, weight))
    assert torch.equal(gemms.linear(x, weight, bias), F.linear(x, weight, bias))
    other = aligned(10, INPUTS)
    assert torch.equal(gemms.linear(x, other), F.linear(x, other))
    float_x, float_weight = x.float(), weight.float()
    assert torch.equal(gemms.linear(float_x, float_weight), F.linear(float_x, float_weight))
    assert library.ran == []


def test_untuned_shapes_are_hinted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._hint_untuned.cache_clear()
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            gemms, library = make({1: (b"0.5",)})
            assert torch.equal(gemms.linear(x, weight), F.linear(x, weight))
            assert library.asked == [], "nothing is tuned at start"
    assert caplog.text.count("loramux tune --model") == 1


def test_dispatcher_works_without_library_and_table() -> None:
    device = torch.device("cpu")
    assert open_cublaslt(device) is None and open_small_m(device) is None
    x, weight = torch.randn(ROWS, 8), torch.randn(4, 8)
    for gemms in (open_dispatcher(device), GemmDispatcher(None), make({}, has_table=False)[0]):
        assert torch.equal(gemms.linear(x, weight), F.linear(x, weight))
        assert torch.equal(gemms.split_k(x, weight), F.linear(x, weight))
        assert gemms.linear_swiglu(x, weight, None) is None


def test_small_m_goes_to_its_kernel() -> None:
    ran: list[int] = []

    def gemm(x: Tensor, weight: Tensor, y: Tensor) -> None:
        ran.append(len(x))
        torch.mm(x, weight.t(), out=y)

    gemms = GemmDispatcher(None, small_m=SmallMGemm(gemm, max_rows=2))
    weight, x = aligned(12, 16), aligned(3, 16)
    out = torch.empty(2, 12, dtype=torch.bfloat16)
    assert gemms.linear(x[:2], weight, out=out) is out
    assert torch.equal(out, F.linear(x[:2], weight))
    assert torch.equal(gemms.split_k(x[:1], weight), F.linear(x[:1], weight))
    assert ran == [2, 1]
    others: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (x, weight, None),
        (x[:1], weight, aligned(1, 12)[0]),
        (x[:1].float(), weight.float(), None),
        (x[::2], weight, None),
        (x[:1], aligned(16, 12).t(), None),
    ]
    for rows, matrix, bias in others:
        torch.testing.assert_close(gemms.linear(rows, matrix, bias), F.linear(rows, matrix, bias))
    assert ran == [2, 1], "more rows, a bias, float32, strided rows, a transposed weight"


def test_split_k_returns_partial_sums_where_tuned() -> None:
    entry: dict[str, Any] = {"algorithm": b"0.9", "num_splits": 2, "split_algorithm": b"0.6"}
    gemms, library = make({1: (b"0.9",), 2: (b"0.6",)}, **entry)
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    y = gemms.split_k(x, weight)
    assert y.shape == (2, ROWS, OUTPUTS) and y.dtype == torch.float32
    torch.testing.assert_close(y.sum(0), x.float() @ weight.float().t())
    assert library.ran == [b"0.6"]
    assert gemms.linear(x, weight).ndim == 2 and library.ran == [b"0.6", b"0.9"]
    assert gemms.split_k(x, weight, aligned(1, OUTPUTS)[0]).ndim == 2, "a bias"
    assert gemms.split_k(aligned(ROWS, 32)[:, :INPUTS], weight).ndim == 2, "strided rows"
    invalid, _ = make({1: (b"0.9",)}, **entry)
    assert invalid.split_k(x, weight).ndim == 2


class Swiglu:
    def supports(self, x: Tensor, weight: Tensor) -> bool:
        return len(x) == ROWS

    def linear_swiglu(self, x: Tensor, weight: Tensor, activation: str) -> Tensor:
        assert activation == "gelu"
        return F.linear(x, weight)[:, : len(weight) // 2]


@pytest.mark.parametrize("is_faster", [True, False])
def test_swiglu_is_fused_where_tuned_and_supported(is_faster: bool) -> None:
    library: Any = FakeCublasLt()
    table = TunedTable("gpu", library.version)
    shape: dict[str, Any] = {"first_m": 1, "m": 64, "n": OUTPUTS, "k": INPUTS}
    table.add([TunedGemm(**shape, dtype=torch.bfloat16, fused_swiglu=is_faster)])
    gemms = GemmDispatcher(library, table, swiglu=Swiglu(), activation="gelu")
    x, weight = aligned(ROWS, INPUTS), aligned(OUTPUTS, INPUTS)
    found = gemms.linear_swiglu(x, weight, None)
    assert (found is not None) == is_faster
    if found is not None:
        assert torch.equal(found, F.linear(x, weight)[:, : OUTPUTS // 2])
    assert gemms.linear_swiglu(x, weight, aligned(1, OUTPUTS)[0]) is None, "a bias"
    assert gemms.linear_swiglu(aligned(ROWS + 1, INPUTS), weight, None) is None, "other rows"
