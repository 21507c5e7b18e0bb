"""Paged attention on a GPU, planned on the host, or on the device for decodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loramux.kernels.gpu.attention import decode_tma, split_kv
from loramux.kernels.gpu.attention.kernel import attend_items, write_rows
from loramux.kernels.gpu.attention.split_kv import Partition, partition_sequences
from loramux.kernels.gpu.pdl import num_sms, pdl_options, supports_tma
from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import AttendArgs, SequenceRows, StepRows, kv_slots
from loramux.types.kv import KVLayout

# A step with more prefills may have more work items than a graph has room for.
_MAX_PREFILLS = 64
# Sixteen CTAs of the TMA kernel fit an SM. With fewer than this per SM, CTAs that start during the
# previous kernel crowd on the SMs that it leaves idle.
_TMA_CTAS_PER_SM = 11
# Most CTAs per SM without splitting; tiles per update, stages, target splits. All CTAs should fit
# at once and spread over the SMs: eight fit with one tile, six with two, four with more stages.
# With few warps per SM, two tiles per update hide latency better. Measured on an H200, as are all
# tiles below.
_DECODE_TILES = (
    *((3, 2, 5, 2), (4, 2, 7, 3), (6, 2, 5, 4), (8, 1, 5, 6)),
    (_TMA_CTAS_PER_SM, 2, 5, 4),
)
_MANY_DECODE_TILES = (1, 5, 6)
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    """Query rows of a CTA: tokens times the query heads that share one KV head."""
    tokens: int
    """Tokens of a tile."""
    item_tokens: int
    """Spans are split at multiples of this."""
    num_warps: int
    num_stages: int
    splits_per_sm: int
    """CTAs per SM that splitting aims at."""
    num_tiles: int = 1
    """Tiles of one online-softmax update, one or two."""
    two_phases: bool = False
    """Tokens that all rows see are processed without masks, before the others."""
    reduced_per_warp: int = 1024
    """Elements of partial results that a warp reduces at once, while as many are in flight."""
    min_split_tokens: int = 1
    """Shorter spans are not split: for many rows the reduction takes longer."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work items of one tile shape, and room for the partial results of split spans."""

    items: Tensor
    tiles: Tiles
    window: int | None
    partial: Tensor
    log_sums: Tensor
    semaphores: Tensor
    """Counts finished splits; zero between kernels."""


@dataclass(frozen=True, slots=True)
class Plan:
    layout: KVLayout
    page_table: Tensor
    """[sequences, pages] int32"""
    slots: Tensor
    """[rows] int32: page * block_tokens + token; a row with a negative slot is not stored."""
    sequences: tuple[SequenceRows, ...] = ()
    is_causal: bool = True
    """False: every row sees all tokens of its work items."""
    work: dict[int | None, tuple[Work, ...]] = field(default_factory=dict)
    """By sliding window; made on first use when `sequences` are known."""

    def first_rows(self, num_rows: int, num_items: Sequence[int]) -> Plan:
        """Return the plan of a smaller graph over these buffers, with num_items per tile shape."""
        work = {
            window: tuple(
                replace(kind, items=kind.items[:count])
                for kind, count in zip(kinds, num_items, strict=True)
            )
            for window, kinds in self.work.items()
        }
        return replace(self, slots=self.slots[:num_rows], work=work)

    def partition(self, num_tokens: Tensor) -> None:
        """Partitions a decode plan's KV on the device. num_tokens [sequences] int32, 0 for padding

        attend reads the items before its PDL wait: another kernel must run in between.
        """
        split_kv.last_slots(num_tokens, self.page_table, self.layout, self.slots)
        for window, works in self.work.items():
            for work in works:
                cut = _partition(work.tiles, self.layout, work.items.device, window, group=1)
                split_kv.partition_decodes(num_tokens, cut, work.items)

    def write_kv(self, storage: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values in their pages."""
        layout = self.layout
        size = layout.num_kv_heads * layout.head_dim
        write_rows[(k.shape[0],)](
            k,
            v,
            storage,
            self.slots,
            k.stride(0),
            v.stride(0),
            storage.stride(0),
            layer * 2 * layout.block_tokens * size,
            BLOCK_TOKENS=layout.block_tokens,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            **pdl_options(k.device.type),
        )

    def attend(self, storage: Tensor, q: Tensor, args: AttendArgs) -> Tensor:
        """Row i attends to its own sequence's tokens up to itself: softmax(q K^T * scale) V."""
        dtype = attention_dtype(q.dtype, storage.dtype)
        if args.sliding_window not in self.work:
            self.work[args.sliding_window] = _make_work(self, q, dtype, args.sliding_window)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for work in self.work[args.sliding_window]:
            if _uses_tma(self, work, q, storage):
                _launch_decode_tma(storage, self, work, q, args, out)
            else:
                _launch(storage, self, work, q, dtype, args, out)
        return out


def attention_dtype(queries: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """Return the dtype in which queries are multiplied with keys, and weights with values.

    Of two 16-bit dtypes it is that of the cache: converted queries are as exact as they were.
    """
    return torch.float32 if torch.float32 in (queries, keys) else keys


def plan(sequences: Sequence[SequenceRows], layout: KVLayout, device: torch.device) -> Plan:
    slots = kv_slots(sequences, layout.block_tokens)
    # Rounded up, so that Triton does not specialise the kernel for every width.
    width = _round_up(max(len(sequence.page_ids) for sequence in sequences), 16)
    page_table = [[*s.page_ids, *[0] * (width - len(s.page_ids))] for s in sequences]
    return Plan(
        layout=layout,
        page_table=send(torch.tensor(page_table, dtype=torch.int32, device="cpu"), device),
        slots=send(torch.tensor(slots, dtype=torch.int32, device="cpu"), device),
        sequences=tuple(sequences),
    )


def plan_decodes(
    page_table: Tensor,
    layout: KVLayout,
    q: Tensor,
    windows: Iterable[int | None] = (None,),
) -> Plan:
    """Return a plan of fixed shape for a CUDA graph: one row per sequence; `partition` fills it.

    page_table [sequences, pages] int32   q: any tensor of the queries' shape, in the dtype of
    `attention_dtype`
    """
    num_sequences, device = page_table.shape[0], page_table.device
    group, num_programs = q.shape[1] // layout.num_kv_heads, num_sequences * layout.num_kv_heads
    each = num_programs / num_sms(device.type)
    tiles = decode_tiles(group, layout, q.dtype, ctas_per_sm=each)
    num_items = num_sequences + _target_splits(tiles, layout, device)
    items = torch.zeros(num_items, 8, dtype=torch.int32, device=device)
    return Plan(
        layout=layout,
        page_table=page_table,
        slots=torch.full((num_sequences,), -1, dtype=torch.int32, device=device),
        is_causal=False,
        work={w: (_work(items.clone(), tiles, layout, w),) for w in windows},
    )


def plan_steps(
    page_table: Tensor,
    slots: Tensor,
    q: Tensor,
    layout: KVLayout,
    items: Mapping[int | None, Sequence[Tensor]],
) -> Plan:
    """Return a plan of fixed shape for a CUDA graph of any step; `partition_steps` makes the items.

    page_table [sequences, pages], slots [rows] int32   q: as in plan_decodes
    """
    tiles = step_tiles(q.shape[1] // layout.num_kv_heads, layout, q.dtype)
    work = {
        window: tuple(_work(*pair, layout, window) for pair in zip(both, tiles, strict=True))
        for window, both in items.items()
    }
    return Plan(layout=layout, page_table=page_table, slots=slots, work=work)


def max_items(num_rows: int, num_sequences: int, q: Tensor, layout: KVLayout) -> list[int]:
    """Most work items of each tile shape that partition_steps makes for such a step.

    A step with very many prefills may have more.
    """
    group = q.shape[1] // layout.num_kv_heads
    tiles = step_tiles(group, layout, q.dtype)
    shares = [_target_splits(kind, layout, q.device) for kind in tiles]
    blocks = -(-num_rows // (tiles[0].rows // group)) + min(num_sequences, _MAX_PREFILLS)
    return [blocks + shares[0], min(num_sequences, num_rows) + shares[1]]


def partition_steps(
    rows: StepRows, window: int | None, q: Tensor, layout: KVLayout
) -> list[Tensor]:
    """[items, 8] int32 on the CPU: work items of sequences with many rows, and with few."""
    group = q.shape[1] // layout.num_kv_heads
    many, few = step_tiles(group, layout, q.dtype)
    limit = few.rows // group
    is_short = rows.lengths <= limit
    return [
        partition_sequences(rows, members, _partition(tiles, layout, q.device, window, group))
        for tiles, members in ((many, ~is_short), (few, is_short))
    ]


def _launch(  # noqa: PLR0913
    storage: Tensor,
    plan: Plan,
    work: Work,
    q: Tensor,
    dtype: torch.dtype,
    args: AttendArgs,
    out: Tensor,
) -> None:
    layout, tiles = plan.layout, work.tiles
    attend_items[(work.items.shape[0] * layout.num_kv_heads,)](
        q,
        storage,
        out,
        work.items,
        plan.page_table,
        work.partial,
        work.log_sums,
        work.semaphores,
        q.stride(0),
        storage.stride(0),
        plan.page_table.stride(0),
        args.layer * 2 * layout.block_tokens * layout.num_kv_heads * layout.head_dim,
        args.scale,
        args.softcap if args.softcap is not None else 1.0,
        KV_HEADS=layout.num_kv_heads,
        GROUP=q.shape[1] // layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_TOKENS=layout.block_tokens,
        WINDOW=work.window or 0,
        HAS_SOFTCAP=args.softcap is not None,
        TWO_PHASES=tiles.two_phases and work.window is None,
        CAUSAL=plan.is_causal,
        ROWS=tiles.rows,
        TILES=tiles.num_tiles,
        TOKENS=tiles.tokens,
        DIM=triton.next_power_of_2(layout.head_dim),
        REDUCED=tiles.num_warps * tiles.reduced_per_warp,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        DTYPE=_NAMES[dtype],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(q.device.type),
    )


def _uses_tma(plan: Plan, work: Work, q: Tensor, storage: Tensor) -> bool:
    """Whether decodes fill the device and fit the TMA kernel."""
    layout, device_type = plan.layout, q.device.type
    least = _TMA_CTAS_PER_SM * num_sms(device_type)
    return (
        not (plan.is_causal or work.window)
        and len(plan.page_table) * layout.num_kv_heads > least
        and q.dtype != torch.float32
        and q.dtype == storage.dtype
        and storage.shape[1] == layout.num_elements
        and q.shape[1] <= decode_tma.MAX_ROWS.value * layout.num_kv_heads
        and layout.head_dim in (64, 128)
        and layout.block_tokens == decode_tma.TOKENS.value
        and supports_tma(device_type)
    )


def _launch_decode_tma(  # noqa: PLR0913
    storage: Tensor, plan: Plan, work: Work, q: Tensor, args: AttendArgs, out: Tensor
) -> None:
    layout, tiles = plan.layout, work.tiles
    copied = storage.view(-1, layout.block_tokens, layout.num_kv_heads * layout.head_dim)
    decode_tma.attend_decodes[(work.items.shape[0] * layout.num_kv_heads,)](
        q,
        TensorDescriptor.from_tensor(copied, [1, layout.block_tokens, layout.head_dim]),
        out,
        work.items,
        plan.page_table,
        work.partial,
        work.log_sums,
        work.semaphores,
        q.stride(0),
        2 * layout.num_layers,
        plan.page_table.stride(0),
        2 * args.layer,
        args.scale,
        args.softcap if args.softcap is not None else 1.0,
        KV_HEADS=layout.num_kv_heads,
        GROUP=q.shape[1] // layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        HAS_SOFTCAP=args.softcap is not None,
        ROWS=tiles.rows,
        REDUCED=tiles.num_warps * tiles.reduced_per_warp,
        num_warps=tiles.num_warps,
        # Prefetches the page number; there are so many CTAs that no tile is prefetched.
        num_stages=3,
        **pdl_options(q.device.type),
    )


def decode_tiles(
    group: int, layout: KVLayout, dtype: torch.dtype, *, ctas_per_sm: float = math.inf
) -> Tiles:
    """For sequences with few rows. ctas_per_sm: if no span were split"""
    rows = max(16, triton.next_power_of_2(group))
    if layout.head_dim > 128 or dtype == torch.float32 or rows > 16:
        return Tiles(rows, 16, 64, 4, 5, 2, reduced_per_warp=512)
    fitting = (kind for most, *kind in _DECODE_TILES if ctas_per_sm <= most)
    num_tiles, stages, shares = next(fitting, _MANY_DECODE_TILES)
    return Tiles(
        rows, 16, 64, 1, stages, shares, num_tiles=num_tiles, reduced_per_warp=1024 * num_tiles
    )


def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    rows = triton.next_power_of_2(group)
    if dtype == torch.float32:
        # Without tensor cores; larger tiles take the compiler a minute.
        return Tiles(max(16, rows), 16, 64, 4, 2, 2, reduced_per_warp=512)
    stages = 3 if head_dim > 128 else 5
    return Tiles(max(128, rows), 64, 64, 8, stages, 1, two_phases=True, min_split_tokens=512)


def step_tiles(group: int, layout: KVLayout, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """For sequences with many rows, and for those whose rows fit one decode tile."""
    # One shape for every step: each shape is a kernel to compile.
    few = decode_tiles(group, layout, dtype)
    return prefill_tiles(group, layout.head_dim, dtype), few


def _make_work(plan: Plan, q: Tensor, dtype: torch.dtype, window: int | None) -> tuple[Work, ...]:
    layout = plan.layout
    tiles = step_tiles(q.shape[1] // layout.num_kv_heads, layout, dtype)
    like = q if q.dtype == dtype else q.new_empty(1, *q.shape[1:], dtype=dtype)
    kinds = partition_steps(StepRows.of(plan.sequences), window, like, layout)
    return tuple(
        _work(send(items, q.device), kind, layout, window)
        for items, kind in zip(kinds, tiles, strict=True)
        if items.shape[0]
    )


def _partition(
    tiles: Tiles, layout: KVLayout, device: torch.device, window: int | None, group: int
) -> Partition:
    return Partition(
        rows=tiles.rows // group,
        tile_tokens=tiles.item_tokens,
        target_splits=_target_splits(tiles, layout, device),
        window=window,
        min_split_tokens=tiles.min_split_tokens,
    )


def _target_splits(tiles: Tiles, layout: KVLayout, device: torch.device) -> int:
    programs = num_sms(device.type) * tiles.splits_per_sm
    return max(1, programs // layout.num_kv_heads)


def _work(items: Tensor, tiles: Tiles, layout: KVLayout, window: int | None) -> Work:
    num_slots = items.shape[0] * layout.num_kv_heads * tiles.rows
    return Work(
        items=items,
        tiles=tiles,
        window=window,
        partial=items.new_empty(num_slots, layout.head_dim, dtype=torch.float32),
        log_sums=items.new_empty(num_slots, dtype=torch.float32),
        semaphores=items.new_zeros(items.shape[0] * layout.num_kv_heads),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
