from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loramux.kernels.cublaslt import CublasLt, CublasLtError, ProductShape
from tests.unit.kernels.conftest import DEVICE

SHAPE = ProductShape(8, 64, 32, torch.bfloat16)


class Library:
    """Counts what is made and given back; the real one needs a GPU."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: Any) -> int:
            self.calls[name] += 1
            return 1 if name == self.fails else 0

        return call


def make(library: Library) -> CublasLt:
    return CublasLt(library, torch.empty(16, dtype=torch.uint8), lambda: 0)


def test_nothing_that_a_search_makes_is_left_behind() -> None:
    library = Library()
    assert make(library).proposals(SHAPE) == []
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        made = library.calls[f"cublasLt{kind}Create"]
        assert made > 0 and made == library.calls[f"cublasLt{kind}Destroy"]


def test_a_shape_without_proposals_is_no_error() -> None:
    assert make(Library("cublasLtMatmulAlgoGetHeuristic")).proposals(SHAPE) == []


def test_what_is_no_algorithm_cannot_run() -> None:
    assert not make(Library()).can_run(SHAPE, b"short")


@pytest.mark.parametrize("name", ["cublasLtCreate", "cublasLtMatmulDescCreate"])
def test_a_call_that_fails_is_named(name: str) -> None:
    with pytest.raises(CublasLtError, match=f"{name} failed with status 1"):
        make(Library(name)).proposals(SHAPE)


@pytest.mark.skipif(DEVICE is None, reason="cuBLASLt needs a GPU (LORAMUX_TEST_DEVICE=cuda)")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 512), (33, 520), (320, 6528)])
def test_every_proposal_computes_the_product(
    dtype: torch.dtype, num_rows: int, num_outputs: int
) -> None:
    from loramux.runner.products import open_cublaslt

    library = open_cublaslt(torch.device("cuda"))
    assert library is not None
    shape = ProductShape(num_rows, num_outputs, 1024, dtype)
    x = torch.randn(num_rows, 1024, dtype=dtype)
    weight = torch.randn(num_outputs, 1024, dtype=dtype)
    wanted = F.linear(x.float(), weight.float())
    proposals = library.proposals(shape)
    assert len(proposals) > 1
    for algorithm in proposals:
        assert library.can_run(shape, algorithm)
        y = torch.full((num_rows, num_outputs), torch.nan, dtype=dtype)
        library.product(shape, algorithm)(x, weight, y)
        torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=1e-1)
