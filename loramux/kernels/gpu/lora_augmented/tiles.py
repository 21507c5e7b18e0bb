"""Kernels of augmented_gpu for tiles of rows that share their adapters: expand and activate_mul.

Tiles are the second axis of a grid: programs that find none come last. A tile's record is read
beside the number of tiles, not behind it: a program that has none has read what nobody uses. A tile
has 16 rows, or (LOOPS) more, taken 16 at a time with the B that was read for the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import activate, load_sum
from loramux.kernels.gpu.lora.mma_layout import (
    add_ordered,
    add_ordered_followers,
    load_ordered_b,
    load_ordered_h,
    order_columns,
    order_rows,
)
from loramux.kernels.gpu.lora.work_item import load_word
from loramux.kernels.gpu.lora_augmented.rank_block import load_followers, load_head
from loramux.kernels.gpu.pdl import pdl_wait_and_launch


@triton.jit
def _are_any(followers):
    return followers[0] < followers[1]


@triton.jit
def _expand_rows(  # noqa: PLR0913
    b, head, followers, start, y_ptr, out_ptr, pool, records, part_step, y_stride, out_stride,
    first, SIZE: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """16 rows of a tile, from `start` on."""
    group, num_rows, row_start = head
    num_rows -= start
    row_start += start
    row = order_rows()
    column = order_columns(WARPS, J)
    inside = (row < num_rows) & (column < SIZE - first)
    y = y_ptr + row_start * y_stride
    tail = y + SIZE
    values = load_sum(
        y + row * y_stride + first + column, inside, part_step, pool.dtype.element_ty, PARTS
    )
    h = load_ordered_h(tail, 16, y_stride, group, num_rows, b.dtype, WARPS, part_step, PARTS)
    total = add_ordered(values.to(tl.float32), h, b, WARPS, J)
    if FOLLOWED:
        total = add_ordered_followers(
            total, followers, pool, records, tail, y_stride, 16, num_rows, first, SIZE - first,
            SIZE, WARPS, J, part_step, PARTS,
        )  # fmt: skip
    out = out_ptr + (row_start + row) * out_stride + first + column
    tl.store(out, total.to(values.dtype), mask=inside)


@triton.jit
def _expand_tile(  # noqa: PLR0913
    head, followers, is_first, y_ptr, out_ptr, pool, records, part_step, y_stride, out_stride,
    first, SIZE: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr,
    LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, num_rows, row_start = head
    if PARTS == 1:
        is_changed = (group[1] > 0) | _are_any(followers)
        head = group, tl.where(is_changed, num_rows, 0), row_start
    if EARLY_B:
        b = load_ordered_b(pool, group, first, SIZE - first, SIZE, WARPS, J)
    if is_first:
        pdl_wait_and_launch(PDL)
    if not EARLY_B:
        b = load_ordered_b(pool, group, first, SIZE - first, SIZE, WARPS, J)
    if LOOPS:
        for start in tl.range(0, head[1], 16, num_stages=1):
            _expand_rows(
                b, head, followers, start, y_ptr, out_ptr, pool, records, part_step, y_stride,
                out_stride, first, SIZE, WARPS, J, PARTS, True,
            )  # fmt: skip
    else:
        _expand_rows(
            b, head, followers, 0, y_ptr, out_ptr, pool, records, part_step, y_stride, out_stride,
            first, SIZE, WARPS, J, PARTS, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["all_rows"])
def expand_kernel(  # noqa: PLR0913
    y_ptr,
    out_ptr,
    pool,
    records,
    work,
    record_start,
    all_rows,
    y_stride,
    out_stride,
    SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    J: tl.constexpr,
    PARTS: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """y with its adapters; a whole one in place: what they do not change is not touched."""
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    records += record_start
    first = tl.program_id(0) * (WARPS * 8 * J)
    part_step = all_rows.to(tl.int64) * y_stride
    num_tiles = load_word(work + 2)
    head = load_head(records + begin * 64)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        followers = load_followers(records + tile * 64)
        _expand_tile(
            head, followers, tile == begin, y_ptr, out_ptr, pool, records, part_step, y_stride,
            out_stride, first, SIZE, WARPS, J, PARTS, LOOPS, EARLY_B, PDL,
        )  # fmt: skip
        head = load_head(records + (tile + step) * 64)


@triton.jit
def _activate_rows(  # noqa: PLR0913
    b_gate, b_up, of_gate, of_up, followers, start, y_ptr, out_ptr, pool, records, y_stride,
    first, INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """16 rows of a tile, from `start` on."""
    num_rows = of_gate[1] - start
    row_start = of_gate[2] + start
    row = order_rows()
    column = order_columns(WARPS, J)
    count = INNER - first
    inside = (row < num_rows) & (column < count)
    tail = y_ptr + row_start * y_stride + 2 * INNER
    at = y_ptr + (row_start + row) * y_stride + first + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + INNER, mask=inside, other=0.0)
    h_gate = load_ordered_h(tail, 32, y_stride, of_gate[0], num_rows, b_gate.dtype, WARPS)
    h_up = load_ordered_h(tail + 16, 32, y_stride, of_up[0], num_rows, b_up.dtype, WARPS)
    gate = add_ordered(gate.to(tl.float32), h_gate, b_gate, WARPS, J)
    up = add_ordered(up.to(tl.float32), h_up, b_up, WARPS, J)
    if FOLLOWED:
        gate = add_ordered_followers(
            gate, followers[0], pool, records, tail, y_stride, 32, num_rows, first, count, INNER,
            WARPS, J,
        )  # fmt: skip
        up = add_ordered_followers(
            up, followers[1], pool, records + 8, tail + 16, y_stride, 32, num_rows, first, count,
            INNER, WARPS, J,
        )  # fmt: skip
    mixed = activate(gate, ACTIVATION) * up
    out = out_ptr + (row_start + row) * INNER + first + column
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_tile(  # noqa: PLR0913
    of_gate, of_up, followers, is_first, y_ptr, out_ptr, pool, records, y_stride, first,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    count = INNER - first
    if EARLY_B:
        b_gate = load_ordered_b(pool, of_gate[0], first, count, INNER, WARPS, J)
        b_up = load_ordered_b(pool, of_up[0], first, count, INNER, WARPS, J)
    if is_first:
        pdl_wait_and_launch(PDL)
    if not EARLY_B and not LOOPS:
        b_gate = load_ordered_b(pool, of_gate[0], first, count, INNER, WARPS, J)
        b_up = load_ordered_b(pool, of_up[0], first, count, INNER, WARPS, J)
    if not LOOPS:
        _activate_rows(
            b_gate, b_up, of_gate, of_up, followers, 0, y_ptr, out_ptr, pool, records, y_stride,
            first, INNER, ACTIVATION, WARPS, J, True,
        )  # fmt: skip
    elif _are_any(followers[0]) | _are_any(followers[1]):
        # There is no room for two groups' B: it is read again for every 16 rows.
        for start in tl.range(0, of_gate[1], 16, num_stages=1):
            b_gate = load_ordered_b(pool, of_gate[0], first, count, INNER, WARPS, J)
            b_up = load_ordered_b(pool, of_up[0], first, count, INNER, WARPS, J)
            _activate_rows(
                b_gate, b_up, of_gate, of_up, followers, start, y_ptr, out_ptr, pool, records,
                y_stride, first, INNER, ACTIVATION, WARPS, J, True,
            )  # fmt: skip
    else:
        b_gate = load_ordered_b(pool, of_gate[0], first, count, INNER, WARPS, J)
        b_up = load_ordered_b(pool, of_up[0], first, count, INNER, WARPS, J)
        for start in tl.range(0, of_gate[1], 16, num_stages=1):
            _activate_rows(
                b_gate, b_up, of_gate, of_up, followers, start, y_ptr, out_ptr, pool, records,
                y_stride, first, INNER, ACTIVATION, WARPS, J, False,
            )  # fmt: skip


@triton.jit
def activate_tiles_kernel(  # noqa: PLR0913
    y_ptr,
    out_ptr,
    pool,
    records,
    work,
    record_start,
    y_stride,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WARPS: tl.constexpr,
    J: tl.constexpr,
    LOOPS: tl.constexpr,
    EARLY_B: tl.constexpr,
    PDL: tl.constexpr,
):
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    records += record_start
    first = tl.program_id(0) * (WARPS * 8 * J)
    num_tiles = load_word(work + 2)
    record = records + begin * 64
    of_gate = load_head(record)
    of_up = load_head(record + 8)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        record = records + tile * 64
        followers = load_followers(record), load_followers(record + 8)
        _activate_tile(
            of_gate, of_up, followers, tile == begin, y_ptr, out_ptr, pool, records, y_stride,
            first, INNER, ACTIVATION, WARPS, J, LOOPS, EARLY_B, PDL,
        )  # fmt: skip
        record = records + (tile + step) * 64
        of_gate = load_head(record)
        of_up = load_head(record + 8)
