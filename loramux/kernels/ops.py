"""Types and Protocols of the op sets; every implementation is tested against kernels.reference.

This module imports none of the implementations. `kernels.select` chooses among them, once at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.sampling_ops import SamplingOps
from loramux.types.kv import KVLayout

if TYPE_CHECKING:
    from loramux.kernels.gpu.extras.tables import ExtrasTables, ReplacedOutputs
    from loramux.kernels.gpu.lora.tables import LoraTables
    from loramux.kernels.gpu.lora_augmented.tables import AugmentedSite, AugmentedWeights

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


# ---- Attention ------------------------------------------------------------------------------


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
class StepRows:
    """The rows of each sequence of a step, [sequences] each; rows of a sequence are adjacent."""

    lengths: Ints
    row_starts: Ints
    positions: Ints
    """Position of each sequence's first row."""

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], positions: Iterable[int]) -> StepRows:
        """Places the sequences' rows one behind the other."""
        counts = np.fromiter(lengths, dtype=np.int32)
        starts = np.cumsum(counts, dtype=np.int32) - counts
        return cls(counts, starts, np.fromiter(positions, dtype=np.int32, count=len(counts)))

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows]) -> StepRows:
        columns = [(s.num_rows, s.row_start, s.position_start) for s in sequences]
        return cls(*np.array(columns, dtype=np.int32).reshape(-1, 3).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendArgs:
    layer: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


def kv_slots(sequences: Sequence[SequenceRows], block_tokens: int) -> list[int]:
    """KV slot of each row of a step: page * block_tokens + token."""
    return [
        sequence.page_ids[position // block_tokens] * block_tokens + position % block_tokens
        for sequence in sequences
        for position in range(sequence.position_start, sequence.num_tokens)
    ]


class AttentionPlan(Protocol):
    """Index tensors of a step, made once and used by every layer."""

    def write_kv(self, storage: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values in their pages.

        storage [pages, layers * 2 * block * kv heads * dim]   k, v [rows, kv heads, dim]
        """

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V.

        q [rows, heads, dim] -> [rows, heads * dim]
        """


class AttentionOps(Protocol):
    def plan(
        self, sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device
    ) -> AttentionPlan:
        """Build the index tensors of a step."""


class DeviceAttentionPlan(AttentionPlan, Protocol):
    @property
    def slots(self) -> Tensor:
        """[rows] int32: page * block_tokens + token; a row with a negative slot is not stored."""

    @property
    def layout(self) -> KVLayout: ...

    def partition(self, num_tokens: Tensor) -> None:
        """Partitions a decode plan's KV into work items, on the device.

        num_tokens [sequences] int32, 0 for padding
        attend reads the items before its PDL wait: at least one other kernel must run in between.
        """

    def first_rows(self, num_rows: int, num_items: Sequence[int]) -> DeviceAttentionPlan:
        """Return the plan of a smaller graph over these buffers, with num_items per tile shape."""


class DeviceAttentionOps(Protocol):
    def attention_dtype(self, queries: torch.dtype, keys: torch.dtype) -> torch.dtype:
        """Return the dtype in which queries are multiplied with keys, and weights with values."""

    def plan(
        self, sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device
    ) -> DeviceAttentionPlan:
        """Build the index tensors of a step."""

    def plan_decodes(
        self,
        page_table: Tensor,
        layout: KVLayout,
        q: Tensor,
        windows: Iterable[int | None] = (None,),
    ) -> DeviceAttentionPlan:
        """Return a plan of one row per sequence for a CUDA graph; `partition` fills it.

        page_table [sequences, pages] int32   q: of the queries' shape, in `attention_dtype`
        """

    def plan_steps(
        self,
        page_table: Tensor,
        slots: Tensor,
        q: Tensor,
        layout: KVLayout,
        items: Mapping[int | None, Sequence[Tensor]],
    ) -> DeviceAttentionPlan:
        """Return a plan for a CUDA graph of any step; `partition_steps` makes the items.

        page_table [sequences, pages], slots [rows] int32   q: as in plan_decodes
        """

    def max_items(
        self, num_rows: int, num_sequences: int, q: Tensor, layout: KVLayout
    ) -> list[int]:
        """Most work items of each tile shape; a step with very many prefills may have more."""

    def partition_steps(
        self, rows: StepRows, window: int | None, q: Tensor, layout: KVLayout
    ) -> list[Tensor]:
        """[items, 8] int32 on the CPU: work items of sequences with many rows, and with few."""


# ---- Elementwise ops between GEMMs ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: y = x / rms(x) * weight. weight [size], or [heads, size] for one norm per head"""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of queries and keys, and the norm of each head before it."""

    cos: Tensor
    sin: Tensor
    """[rows, head_dim] each: both halves equal, but sin is negated in the first one."""
    head_norm: Norm | None = None
    """weight [heads + kv_heads, head_dim]"""


@dataclass(frozen=True, slots=True)
class KVTarget:
    """The pages that a step's keys and values are written to."""

    storage: Tensor
    slots: Tensor
    """[rows] int32: page * block_tokens + token; a row with a negative slot is not stored."""
    layout: KVLayout
    layer: int


class ElementwiseOps(Protocol):
    """The ops between a decoder's GEMMs, computed in float32."""

    def rotation(
        self, positions: Tensor, frequencies: Tensor, signs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """cos * |signs| and sin * signs of positions * frequencies: [rows, head_dim] float32 each.

        positions [rows] int32   frequencies, signs [head_dim] float32
        """

    def norm_columns(self, x: Tensor, norm: Norm) -> None:
        """Norms each row of x [rows, size] in place; rows may be strided."""

    def rotate_write(self, qkv: Tensor, rotation: Rotation, target: KVTarget) -> Tensor:
        """Rotates queries in place and returns them; writes rotated keys and values to pages.

        qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads, head_dim], a view of it
        """

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, after: Norm | None = None
    ) -> Tensor:
        """residual += x, in place; returns norm(residual). With `after`, x is normed first.

        Without a norm it returns the residual itself.

        x, residual [rows, hidden]
        x may be a split-K GEMM's partial sums, float32 [splits, rows, hidden]: they are reduced
        and rounded first (on a GPU and in the reference)
        """

    def activate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up. gate_up [rows, 2 * inner], gate first -> [rows, inner]"""


class SwigluOps(Protocol):
    """The gate_up GEMM with its activation in the epilogue."""

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `linear_swiglu` takes tensors of these shapes, types and strides."""

    def linear_swiglu(self, x: Tensor, weight: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where x @ weight.T is gate and up side by side; rounded once.

        x [rows, inputs]   weight [2 * inner, inputs] -> [rows, inner]
        """


# ---- LoRA on a CPU --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """b [adapters, rank, out]: from columns rank_start.. of x @ a to columns out_start.. of y."""

    b: Tensor
    rank_start: int
    out_start: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One site of several adapters of equal ranks: a [adapters, in, total rank], and B by slice."""

    a: Tensor
    slices: tuple[LoraSlice, ...]
    addresses: NDArray[np.int64] | None = None
    """Address of each adapter, for kernels that read it in place; None: adapters are in `a`."""
    prepared: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = field(default_factory=list)
    """Arrays that a kernel derived from the weights, cached for its next call."""


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
    """[n] position of each of them in gather."""
    weights: Tensor | None
    """[slots, rows_per_slot, 1], or None when all are 1."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Which rows use which adapter of one stack, in one step."""

    segments: tuple[Segment, ...]
    stacked: StackedRows | None = None
    """The segments that go through one bmm; None for the reference."""
    single: tuple[Segment, ...] = ()
    """The segments that are long enough for a GEMM of their own."""
    rounds: tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...] = ()
    """Work of a compiled loop, one round after the other: runs [n, 3] of rows (slot, start, stop)
    that do not overlap within a round, and their weights [n]."""
    num_threads: int = 1
    """Threads of that loop."""
    then: LoraRows | None = None
    """Further adapters of some of these rows, to be added after the above."""


class LoraKernels(Protocol):
    READS_ADDRESSES: bool
    """Whether `LoraWeights.addresses` is used: adapters may be anywhere, unused slots are free."""

    def cut_rows(self, segments: Sequence[Segment], num_slots: int) -> LoraRows:
        """Prepare segments, which may overlap: rows with several adapters have one of each.

        Adapters are added to a row in the order of its segments.
        """
        ...

    def add_lora(self, y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
        """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; other rows are untouched.

        y [rows, out]   x [rows, in]
        """
        ...


# ---- LoRA on a GPU --------------------------------------------------------------------------


class SegmentedLoraOps(Protocol):
    """LoRA by a step's work list (SGMV). pool [pages, elements]"""

    def resolve(self, tables: LoraTables, directory: Tensor, slots: Tensor) -> None:
        """Write the addresses of A and B of each work item, layer and projection.

        directory int32 [layers, blocks, 4]   slots int32 [slots, 8 projections, 2]
        """

    def shrink(self, tables: LoraTables, pool: Tensor, x: Tensor, layer: int, site: int) -> None:
        """h = x @ A.T for every work item. x [rows, in]"""

    def expand(self, tables: LoraTables, pool: Tensor, y: Tensor, layer: int, site: int) -> None:
        """y += weight * h @ B for every work item. y [rows, out]"""

    def expand_swiglu(  # noqa: PLR0913
        self, tables: LoraTables, pool: Tensor, y: Tensor, activation: str, layer: int, site: int
    ) -> Tensor:
        """activation(gate) * up of y as `expand` would leave it: [rows, inner]"""


class AugmentedLoraOps(Protocol):
    """LoRA whose A is appended to the base weights: y has h behind its outputs."""

    def copy_block(  # noqa: PLR0913
        self,
        weights: AugmentedWeights,
        pool: Tensor,
        directory: Tensor,
        slots: Tensor,
        *,
        rank_block: tuple[int, int],
        block: int,
    ) -> None:
        """Copy A of one rank block of one adapter behind every weight."""

    def expand(self, y: Tensor, lora: AugmentedSite) -> Tensor:
        """y += h @ B, in place: [rows, outputs]. y [rows, outputs + ranks]"""

    def rotate_write(
        self, y: Tensor, rotation: Rotation, target: KVTarget, lora: AugmentedSite
    ) -> Tensor:
        """`ElementwiseOps.rotate_write` of y with its adapters."""

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, lora: AugmentedSite
    ) -> Tensor:
        """`ElementwiseOps.add_norm` of y with its adapters."""

    def activate_mul(self, y: Tensor, activation: str, lora: AugmentedSite) -> Tensor:
        """`ElementwiseOps.activate_mul` of y with its adapters."""


class ExtrasOps(Protocol):
    """Parts of adapters beside low rank; `scale_logits` is the `scale_add` of the head."""

    def scale_add(self, tables: ExtrasTables, y: Tensor, vector: int) -> None:
        """y = y * (1 + sum of weight * gain) + sum of weight * bias, in place. y [rows, out]"""

    def scale_logits(self, tables: ExtrasTables, logits: Tensor) -> None: ...

    def embed_rows(self, tables: ExtrasTables, y: Tensor, token_ids: Tensor, scale: float) -> None:
        """Replace embeddings y [rows, hidden], or add low rank, times scale. token_ids [rows]"""

    def replace_outputs(
        self, tables: ExtrasTables, y: Tensor, x: Tensor, linear: ReplacedOutputs
    ) -> None:
        """y = x @ weight.T + bias at the projections that the row's adapter replaces."""

    def replace_logits(self, tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
        """logits = hidden @ head.T, or some columns of it; -inf past the last row of the head."""

    def add_low_rank_logits(self, tables: ExtrasTables, logits: Tensor, hidden: Tensor) -> None:
        """logits += weight * hidden @ A.T @ B.T"""


# ---- Compiled CPU loops (float32) -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer as tensor and as array: converting takes as long as many a compiled loop."""

    tensor: Tensor
    array: Array


def empty_rows(num_rows: int, width: int) -> Rows:
    array = np.empty((num_rows, width), dtype=np.float32)
    return Rows(torch.from_numpy(array), array)


@dataclass(frozen=True, slots=True)
class NormArrays:
    """`Norm` as the compiled loops read it."""

    weight: Array
    eps: np.float32


@dataclass(frozen=True, slots=True)
class RotateWriteArrays:
    """`Rotation` and `KVTarget` as the compiled loops read them."""

    cos: Array
    sin: Array
    slots: Ints
    storage: Array


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An op that a compiled GEMM applies to each row of y as soon as the row is complete."""

    kind: int
    source: Array
    out: Array
    weight: Array
    eps: np.float32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight in the panel layout of the compiled GEMM."""

    in_features: int
    out_features: int
    depth: int
    """Inputs in one block of K."""
    panels: Array
    """[blocks of K, panels, depth, tile width], zero behind the last column."""
    start: Array
    """Initial value of y: the bias or zeros, as wide as all panels."""


class JitAttentionPlan(AttentionPlan, Protocol):
    @property
    def slots(self) -> Tensor:
        """[rows] int32: page * block_tokens + token."""

    def attend_into(self, out: Rows, storage: Tensor, q: Tensor, args: AttendArgs) -> None:
        """`attend`, written to `out`."""


class JitAttentionOps(Protocol):
    def plan(
        self, sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device
    ) -> JitAttentionPlan:
        """Build the index tensors of a step."""


class JitElementwiseOps(ElementwiseOps, Protocol):
    def norm_arrays(self, norm: Norm) -> NormArrays: ...

    def add_norm_into(
        self,
        x: Array | None,
        residual: Array,
        norms: tuple[NormArrays, NormArrays | None],
        out: Array,
    ) -> None:
        """`add_norm`, written to `out`; with a second norm, x is overwritten."""

    def norm_add_into(self, x: Array, residual: Array, after: NormArrays | None) -> None:
        """residual += after(x); x is overwritten."""

    def rotate_write_into(
        self,
        qkv: Array,
        head_norm: NormArrays | None,
        arrays: RotateWriteArrays,
        layout: KVLayout,
        layer: int,
    ) -> None:
        """`rotate_write` in place."""

    def add_norm_epilogue(self, residual: Array, norm: NormArrays, out: Array) -> Epilogue:
        """`add_norm_into` of each row of a GEMM."""

    def silu_mul_epilogue(self, out: Array) -> Epilogue:
        """silu(gate) * up of each row of a GEMM, written to `out`."""

    def run_epilogue(self, epilogue: Epilogue, y: Array) -> None:
        """Apply the epilogue to all rows of y, which another GEMM has computed."""


class JitLoraOps(LoraKernels, Protocol):
    def add_lora_rows(self, y: Array, x: Array, weights: LoraWeights, rows: LoraRows) -> None:
        """`add_lora` of contiguous arrays."""


class JitGemmOps(Protocol):
    """GEMM over a weight that was packed once."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """weight [out, in], bias [out]"""

    def multiply(self, x: Tensor, matrix: PackedMatrix) -> Tensor:
        """x [rows, in] -> [rows, out]"""


class JitLinearOps(Protocol):
    """GEMM, adapters and epilogue in one parallel loop."""

    def linear_into(
        self,
        x: Array,
        matrix: PackedMatrix,
        adapters: Sequence[tuple[LoraWeights, LoraRows]],
        y: Array,
        epilogue: Epilogue | None = None,
    ) -> None:
        """y = x @ matrix + what the adapters add, then the epilogue. x, y contiguous"""


# ---- What is selected at start --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JitKernels:
    attention: JitAttentionOps
    elementwise: JitElementwiseOps
    lora: JitLoraOps
    linear: JitLinearOps | None
    """None: this platform has no compiled GEMM, torch computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The op sets of a CPU, or of the reference on any device."""

    name: str
    attention: AttentionOps
    lora: LoraKernels
    jit: JitKernels | None = None
    """The compiled loops of the whole layer; None: the model's own torch ops run between GEMMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """The op sets of a GPU, and what its driver says about it."""

    attention: DeviceAttentionOps
    elementwise: ElementwiseOps
    swiglu: SwigluOps | None
    """None: GEMM and activation run one after the other."""
    lora: SegmentedLoraOps
    augmented: AugmentedLoraOps
    extras: ExtrasOps
    sampling: SamplingOps
    num_sms: int
    supports_pdl: bool
    """Programmatic dependent launch: a kernel may start before the one ahead of it ends."""
