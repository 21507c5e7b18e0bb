"""One group of an adapter's ranks, as the kernels of the tail see it: its record, its B, its h."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.fused_triton import load_sum
from loramux.kernels.lora_records_triton import load_word


@triton.jit
def load_parts(at, inside, part_step, dtype, PARTS: tl.constexpr):
    """As fused_triton's load_sum, for tiles: a sum that is not taken apart again.

    Else every part is moved to where the matrix units want it, and not their sum.
    """
    total = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        more = tl.load(at + part * part_step, mask=inside, other=0.0)
        total = tl.sum(tl.join(total, more), 2)
    return total.to(dtype)


@triton.jit
def load_group(record):
    """A record's group: where B begins in the pool, its ranks, its block of the tail, its weight.

    All words of a record are read together, before anything waits for them.
    """
    address = load_word(record + 1).to(tl.int64) * 64
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    return address, load_word(record + 2) & 255, load_word(record + 4), weight


@triton.jit
def load_followers(record):
    """The units that follow a head, first and end."""
    first = load_word(record + 6)
    return first, first + load_word(record + 7)


@triton.jit
def load_head(record):
    """A head's group, its followers, how many rows it has, and the first of them."""
    group = load_group(record)
    num_rows = load_word(record + 2) >> 16
    return group, load_followers(record), num_rows, load_word(record + 3).to(tl.int64)


@triton.jit
def load_b(pool, group, first, count, width, N: tl.constexpr):
    """Columns first.. of a group [ranks, width], as [16, N]; `count` of them are there."""
    rank = tl.arange(0, 16)[:, None]
    column = tl.arange(0, N)[None, :]
    mask = (rank < group[1]) & (column < count)
    return tl.load(pool + group[0] + rank * width + first + column, mask=mask, other=0.0)


@triton.jit
def load_h(  # noqa: PLR0913
    tail, h_step, tail_stride, group, num_rows, dtype, ROWS: tl.constexpr,
    part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """weight * h of a group: [ROWS, 16], rounded as it is multiplied; for one row [16] float32.

    tail: of a tile's first row, at the slice   h_step: from a block of the tail to the next
    part_step: from a part of the product to the next
    """
    at = tail + group[2] * h_step
    rank = tl.arange(0, 16)
    # A row without an adapter has no block: whatever there is may be no number.
    num_rows = tl.where(group[1] > 0, num_rows, 0)
    if ROWS == 1:
        h = load_sum(at + rank, rank < num_rows * 16, part_step, dtype, PARTS)
        h = h.to(tl.float32) * group[3]
    else:
        row = tl.arange(0, ROWS)[:, None]
        at += row * tail_stride + rank[None, :]
        h = load_parts(at, row < num_rows, part_step, dtype, PARTS)
        h = (h.to(tl.float32) * group[3]).to(dtype)
    return h


@triton.jit
def add_product(total, h, b, ROWS: tl.constexpr):
    """total + h @ b: [ROWS, N] float32"""
    if ROWS == 1:
        total += tl.sum(b.to(tl.float32) * h[:, None], axis=0)[None, :]
    else:
        total = tl.dot(h, b, total, input_precision="ieee")
    return total


@triton.jit
def add_followers(  # noqa: PLR0913
    total, units, pool, records, tail, tail_stride, h_step, num_rows, first, count, width,
    ROWS: tl.constexpr, N: tl.constexpr, part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """total [ROWS, N] float32 with all that the followers of a head add.

    records, tail: at the slice   units: of load_followers
    """
    for unit in tl.range(units[0], units[1], num_stages=1):
        group = load_group(records + unit * 64)
        b = load_b(pool, group, first, count, width, N)
        h = load_h(tail, h_step, tail_stride, group, num_rows, b.dtype, ROWS, part_step, PARTS)
        total = add_product(total, h, b, ROWS)
    return total
