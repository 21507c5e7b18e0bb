"""Dispatches a decoder's GEMMs: small M to our kernel, tuned shapes to their cuBLASLt algorithm."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.kernels.gpu.gemm.cublaslt import CublasLt, Gemm, GemmShape
from loramux.kernels.ops import SwigluOps
from loramux.memory.device import device_name, load_library, stream_address
from loramux.runner.gemm.table import TunedGemm, TunedTable, find_tables

_log = logging.getLogger(__name__)
# Larger GEMMs are near the device's limit with any algorithm; for smaller ones the algorithm that
# is fastest in isolation was slower in whole steps.
TUNED_ROWS = range(16, 1025)
_WORKSPACE_BYTES = 32 * 2**20
# torch computes float32, which is for reference, unless a check adds it here.
SMALL_M_DTYPES = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class SmallMGemm:
    """A kernel that beats the library's GEMMs up to max_rows rows."""

    gemm: Gemm
    max_rows: int

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        return (
            len(x) <= self.max_rows
            and x.dtype in SMALL_M_DTYPES
            and x.is_contiguous()
            and weight.is_contiguous()
        )


class GemmDispatcher:
    """Works without a library and without a table: torch computes what is not tuned."""

    def __init__(
        self,
        library: CublasLt | None,
        table: TunedTable | None = None,
        *,
        small_m: SmallMGemm | None = None,
        swiglu: SwigluOps | None = None,
        activation: str = "silu",
    ) -> None:
        self._library = library
        self._table = table
        self._small_m = small_m
        self._swiglu = swiglu
        self._activation = activation
        self._gemms: dict[GemmShape, Gemm | None] = {}

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias. x [rows, inputs]   weight [outputs, inputs]"""
        gemm = None
        if bias is None and self._small_m is not None and self._small_m.supports(x, weight):
            gemm = self._small_m.gemm
        elif bias is None and (tuned := self._find(x, weight)) is not None:
            gemm = self._gemm(_shape(x, weight), tuned.algorithm)
        if gemm is None:
            if out is None:
                return F.linear(x, weight, bias)
            return torch.mm(x, weight.t(), out=out)
        y = x.new_empty(len(x), len(weight)) if out is None else out
        gemm(x, weight, y)
        return y

    def split_k(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`linear` for a consumer that can reduce split-K partial sums.

        Returns [rows, outputs], or float32 [splits, rows, outputs] where split-K is faster: the
        consumer's reduction saves the library's own, which is one more launch.
        """
        is_small = self._small_m is not None and self._small_m.supports(x, weight)
        if bias is not None or is_small:
            return self.linear(x, weight, bias)
        tuned = self._find(x, weight)
        if tuned is None or tuned.num_splits == 1:
            return self.linear(x, weight)
        gemm = self._gemm(_shape(x, weight, tuned.num_splits), tuned.split_algorithm)
        if gemm is None:
            return self.linear(x, weight)
        y = x.new_empty(tuned.num_splits, len(x), len(weight), dtype=torch.float32)
        gemm(x, weight, y)
        return y

    def linear_swiglu(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """gate_up with its activation in one kernel where that is faster; None elsewhere.

        weight: gate's outputs, then up's
        """
        swiglu = self._swiglu
        if swiglu is None or bias is not None or not swiglu.supports(x, weight):
            return None
        if not self._is_fused_faster(x, weight):
            return None
        return swiglu.linear_swiglu(x, weight, self._activation)

    def _is_fused_faster(self, x: Tensor, weight: Tensor) -> bool:
        tuned = self._find(x, weight)
        return tuned is not None and tuned.fused_swiglu

    def _find(self, x: Tensor, weight: Tensor) -> TunedGemm | None:
        if self._library is None or self._table is None or x.dtype == torch.float32:
            return None
        if len(x) not in TUNED_ROWS or not _shape(x, weight).fits(x, weight):
            return None
        found = self._table.find(len(x), len(weight), x.shape[1], x.dtype)
        if found is None:
            _hint_untuned(self._table.gpu)
        return found

    def _gemm(self, shape: GemmShape, algorithm: bytes) -> Gemm | None:
        """None: torch computes it, by choice or since the descriptor does not fit."""
        if not algorithm or self._library is None:
            return None
        if shape not in self._gemms:
            can_run = self._library.can_run(shape, algorithm)
            self._gemms[shape] = self._library.gemm(shape, algorithm) if can_run else None
        return self._gemms[shape]


@functools.cache
def _hint_untuned(gpu: str) -> None:
    """Once per process."""
    _log.warning(
        "some GEMMs of this model are not tuned for %s and use the library's default algorithms; "
        "`loramux tune --model DIR` tunes them",
        gpu,
    )


def _shape(x: Tensor, weight: Tensor, num_splits: int = 1) -> GemmShape:
    return GemmShape(len(x), len(weight), x.shape[1], x.dtype, num_splits)


def open_dispatcher(
    device: torch.device, swiglu: SwigluOps | None = None, activation: str = "silu"
) -> GemmDispatcher:
    library = open_cublaslt(device)
    table = None if library is None else find_tables(device_name(device), library.version)
    return GemmDispatcher(
        library, table, small_m=open_small_m(device), swiglu=swiglu, activation=activation
    )


def open_small_m(device: torch.device) -> SmallMGemm | None:
    """None: the kernel does not run on this device, or is no faster there."""
    if device.type != "cuda":
        return None
    from loramux.kernels.gpu import pdl
    from loramux.kernels.gpu.gemm import small_m

    if not pdl.supports_pdl(device.type):
        return None
    if pdl.shared_bytes(device.type) < small_m.SHARED_BYTES:
        return None
    return SmallMGemm(small_m.gemm, small_m.MAX_ROWS)


def open_cublaslt(device: torch.device) -> CublasLt | None:
    """None: this device has none."""
    library = load_library("cublasLt", device)
    if library is None:
        return None
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return CublasLt(library, workspace, functools.partial(stream_address, device))
