"""A stand-in for cuBLASLt, which needs a GPU: algorithms are named by the seconds they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLtError, GemmShape
from loramux.runner.gemm.autotune import Timing

FAILS = b"fails"


class FakeCublasLt:
    version = 7

    def __init__(self, by_splits: dict[int, tuple[bytes, ...]] | None = None) -> None:
        self.by_splits = by_splits or {}
        self.asked: list[GemmShape] = []
        self.ran: list[bytes] = []

    def candidates(self, shape: GemmShape) -> list[bytes]:
        self.asked.append(shape)
        return list(self.by_splits.get(shape.num_splits, ()))

    def variants(self, shape: GemmShape, algorithm: bytes) -> list[bytes]:
        del shape
        return [algorithm]

    def cluster_size(self, algorithm: bytes) -> int:
        return len(algorithm)

    def can_run(self, shape: GemmShape, algorithm: bytes) -> bool:
        return algorithm in self.by_splits.get(shape.num_splits, ())

    def gemm(self, shape: GemmShape, algorithm: bytes) -> Callable[..., None]:
        def run(x: Tensor, weight: Tensor, y: Tensor) -> None:
            if algorithm == FAILS:
                raise CublasLtError(f"no such algorithm for {shape}")
            self.ran.append(algorithm)
            splits = zip(*(t.float().chunk(shape.num_splits, 1) for t in (x, weight)), strict=True)
            y.copy_(torch.stack([a @ b.t() for a, b in splits]).view_as(y))

        return run

    def timing(self, extra_seconds: Callable[[], float] = lambda: 0.0) -> Timing:
        """Seconds of the algorithm that ran first (torch: 1.0), and what the test adds."""

        def quick(run: Callable[[], object]) -> float:
            self.ran.clear()
            run()
            return (float(self.ran[0]) if self.ran else 1.0) + extra_seconds()

        return Timing(quick)


def aligned(num_rows: int, size: int) -> Tensor:
    """bfloat16 at a multiple of 256 bytes, which the library assumes; a CPU gives 64."""
    buffer = torch.randn(num_rows * size + 128).to(torch.bfloat16)
    start = -buffer.data_ptr() % 256 // 2
    return buffer[start : start + num_rows * size].view(num_rows, size)
