from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loramux.kernels.gpu.gemm.cublaslt import CublasLt, CublasLtError, GemmShape
from tests.unit.kernels.conftest import DEVICE

SHAPE = GemmShape(8, 64, 32, torch.bfloat16)


class Library:
    """Counts what is made and given back; the real one needs a GPU."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: Counter[str] = Counter()
        self.layouts: list[tuple[int, ...]] = []
        self.attributes: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if name == "cublasLtMatrixLayoutCreate":
                self.layouts.append(tuple(argument.value for argument in arguments[1:]))
            if name == "cublasLtMatrixLayoutSetAttribute":
                self.attributes.append((arguments[1].value, arguments[2]._obj.value))
            return 1 if name == self.fails else 0

        return call


def make(library: Library) -> CublasLt:
    return CublasLt(library, torch.empty(16, dtype=torch.uint8), lambda: 0)


def test_descriptors_are_destroyed_after_a_search() -> None:
    library = Library()
    assert make(library).candidates(SHAPE) == []
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        made = library.calls[f"cublasLt{kind}Create"]
        assert made > 0 and made == library.calls[f"cublasLt{kind}Destroy"]


def test_variants_have_other_clusters_and_swizzles() -> None:
    library = Library()
    lt = make(library)
    assert lt.variants(SHAPE, bytes(64)) == [bytes(64)] * 14, "a library that changes nothing"
    assert library.calls["cublasLtMatmulAlgoConfigSetAttribute"] == 28
    for kind in ("MatmulDesc", "MatrixLayout"):
        assert library.calls[f"cublasLt{kind}Create"] == library.calls[f"cublasLt{kind}Destroy"]
    assert make(Library("cublasLtMatmulAlgoCheck")).variants(SHAPE, bytes(64)) == []
    assert lt.cluster_size(bytes(64)) == 1, "no cluster that is known"
    assert make(Library("cublasLtMatmulAlgoConfigGetAttribute")).cluster_size(bytes(64)) == 1


def test_a_shape_without_candidates_is_no_error() -> None:
    assert make(Library("cublasLtMatmulAlgoGetHeuristic")).candidates(SHAPE) == []


def test_a_descriptor_of_another_size_is_invalid() -> None:
    assert not make(Library()).can_run(SHAPE, b"short")


def test_each_split_has_its_slice_of_k_and_an_output_of_its_own() -> None:
    """Columns of x and weight stay as far apart as all inputs; outputs are float32 (0)."""
    library = Library()
    make(library).gemm(replace(SHAPE, num_splits=2), bytes(64))
    assert library.layouts == [(14, 16, 64, 32), (14, 16, 8, 32), (0, 64, 8, 64)]
    assert library.attributes == [(5, 2), (6, 16), (5, 2), (6, 16), (5, 2), (6, 512)]


def test_a_gemm_without_split_k_is_no_batch() -> None:
    library = Library()
    lt = make(library)
    for _ in range(2):
        lt.gemm(SHAPE, bytes(64))
    once = [(14, 32, 64, 32), (14, 32, 8, 32), (14, 64, 8, 64)]
    assert library.layouts == once, "all algorithms of a shape share them"
    assert library.attributes == []


@pytest.mark.parametrize("name", ["cublasLtCreate", "cublasLtMatmulDescCreate"])
def test_a_call_that_fails_is_named(name: str) -> None:
    with pytest.raises(CublasLtError, match=f"{name} failed with status 1"):
        make(Library(name)).candidates(SHAPE)


@pytest.mark.skipif(DEVICE is None, reason="cuBLASLt needs a GPU (LORAMUX_TEST_DEVICE=cuda)")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "num_splits"),
    [(1, 512, 1), (33, 520, 1), (320, 6528, 1), (33, 520, 2), (128, 4096, 8), (320, 4224, 4)],
)
def test_every_candidate_computes_the_gemm(
    dtype: torch.dtype, m: int, n: int, num_splits: int
) -> None:
    from loramux.runner.gemm.dispatch import open_cublaslt

    library = open_cublaslt(torch.device("cuda"))
    assert library is not None
    shape = GemmShape(m, n, 1024, dtype, num_splits)
    x = torch.randn(m, 1024, dtype=dtype)
    weight = torch.randn(n, 1024, dtype=dtype)
    wanted = F.linear(x.float(), weight.float())
    candidates = library.candidates(shape)
    assert len(candidates) > 1
    varied = {other for some in candidates[:3] for other in library.variants(shape, some)}
    assert len({library.cluster_size(other) for other in varied}) > 1
    for algorithm in {*candidates, *varied}:
        assert library.can_run(shape, algorithm)
        y = torch.full((num_splits, m, n), torch.nan, dtype=shape.y_dtype)
        library.gemm(shape, algorithm)(x, weight, y)
        torch.testing.assert_close(y.float().sum(0), wanted, rtol=2e-2, atol=1e-1)
