"""What the kernels take and give. Each has a plain torch version that the others must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """b [adapters, rank, out]: from columns rank_start.. of x @ a to columns out_start.. of y."""

    b: Tensor
    rank_start: int
    out_start: int
    b_rows: Tensor | None = None
    """As `a_rows`, of b."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One site of several adapters of equal ranks: a [adapters, in, total rank], and B by slice."""

    a: Tensor
    slices: tuple[LoraSlice, ...]
    a_rows: Tensor | None = None
    """Rows of one matrix, of which adapter i's are those from i * stride(0) / width of a on; None
    where adapters do not stand a whole number of rows apart."""
    addresses: NDArray[np.int64] | None = None
    """Where each adapter begins, for kernels that read it there; None: in the memory of a."""
    prepared: list[Any] = field(default_factory=list)
    """What a kernel has made of the above, for its next call."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of the batch that use one adapter of a stack."""

    slot: int
    start: int
    stop: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Segments cut for `bmm`: slot i of the stack reads rows_per_slot rows, short ones padded."""

    num_slots: int
    rows_per_slot: int
    start: int | None
    """First row, when the rows are one run with no padding; None: use gather."""
    gather: Tensor
    """[slots * rows_per_slot] batch rows to read; padding reads row 0 and is never written back."""
    rows: Tensor
    """[n] batch rows to write."""
    positions: Tensor
    """[n] where each of them stands in gather."""
    weights: Tensor | None
    """[slots, rows_per_slot, 1], or None when all are 1."""
    bags: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Indices and offsets of weighted sums of adapters' rows, by rows a slot and their distance."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Which rows use which adapter of one stack, in one step."""

    segments: tuple[Segment, ...]
    stacked: StackedRows | None = None
    """The segments that go through one bmm; None for the reference."""
    single: tuple[Segment, ...] = ()
    """The segments that are long enough for a matrix product of their own."""
    rounds: tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...] = ()
    """What a compiled loop computes, one round after the other: runs [n, 3] of rows that no other
    run of the round has (slot, first row, behind the last), and their weights [n]."""
    num_threads: int = 1
    """Of that loop."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The same memory twice: to make one of the other takes as long as many a compiled loop."""

    tensor: Tensor
    array: NDArray[np.float32]


def empty_rows(num_rows: int, width: int) -> Rows:
    array = np.empty((num_rows, width), dtype=np.float32)
    return Rows(torch.from_numpy(array), array)


class LoraKernels(Protocol):
    READS_ADDRESSES: bool
    """Of LoraWeights: adapters may lie anywhere, and slots that no row uses cost nothing."""

    def cut_rows(self, segments: Sequence[Segment], num_slots: int) -> LoraRows: ...

    def add_lora(self, y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
        """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; other rows are untouched.

        y [rows, out]   x [rows, in]
        """
        ...


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence in a step: rows row_start.. are its tokens at positions position_start.."""

    row_start: int
    num_rows: int
    position_start: int
    page_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return self.position_start + self.num_rows


@dataclass(frozen=True, slots=True)
class PagedLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendArgs:
    layer: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


def kv_slots(sequences: Sequence[SequenceRows], block_tokens: int) -> list[int]:
    """Where each row of a step keeps its keys and values: page * block_tokens + token."""
    return [
        sequence.page_ids[position // block_tokens] * block_tokens + position % block_tokens
        for sequence in sequences
        for position in range(sequence.position_start, sequence.num_tokens)
    ]


class AttentionKernels(Protocol):
    def plan(
        self, sequences: Sequence[SequenceRows], layout: PagedLayout, device: torch.device
    ) -> Any:
        """Index tensors of a step, made once and used by every layer."""
        ...

    def write_kv(self, storage: Tensor, plan: Any, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the step's keys and values in their pages.

        storage [pages, layers * 2 * block * kv heads * dim]   k, v [rows, kv heads, dim]
        """
        ...

    def attend(self, storage: Tensor, plan: Any, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V.

        q [rows, heads, dim] -> [rows, heads * dim]
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    lora: LoraKernels
    attention: AttentionKernels
    name: str = field(default="torch")
    fused: Any = None
    """The operations between matrix products, as fused_torch has them; None: the model's own."""


def select_kernels(
    device_type: str, *, reference: bool, dtype: torch.dtype, may_compile: bool = True
) -> Kernels:
    """Chosen once, at start; there is no other switch between implementations."""
    from loramux.kernels.reference import attention as attention_torch
    from loramux.kernels.reference import lora as lora_torch

    if reference:
        return Kernels(lora=lora_torch, attention=attention_torch, name="torch")
    if may_compile and device_type == "cpu" and dtype == torch.float32:
        compiled = _compiled_kernels()
        if compiled is not None:
            return compiled
    from loramux.kernels.cpu import attention as attention_cpu
    from loramux.kernels.cpu import lora as lora_cpu

    return Kernels(lora=lora_cpu, attention=attention_cpu, name="cpu")


def _compiled_kernels() -> Kernels | None:
    """Compiled here, or read from the cache of an earlier start; None: numba is not installed."""
    try:
        from loramux.kernels.cpu_jit import attention as attention_numba
        from loramux.kernels.cpu_jit import elementwise as fused_numba
        from loramux.kernels.cpu_jit import lora as lora_numba
        from loramux.kernels.cpu_jit import runtime as math_numba
        from loramux.kernels.cpu_jit import thread_affinity as pin_numba
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    math_numba.use_threads(torch.get_num_threads())
    pin_numba.pin_workers(torch.get_num_threads())
    return Kernels(lora=lora_numba, attention=attention_numba, fused=fused_numba, name="numba")
