"""One group of an adapter's ranks, as the kernels of the tail see it: its record, its B, its h.

Lists have the same records, with another h. And where a head is, for those that rotate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import load_sum
from loramux.kernels.gpu.lora.work_item import load_word


@triton.jit
def load_group(record):
    """A record's group: where B begins in the pool, its ranks, its block of the tail (or the
    first of its h), its weight.

    All words of a record are read together, before anything waits for them.
    """
    address = load_word(record + 1).to(tl.int64) * 64
    weight = load_word(record + 5).to(tl.float32, bitcast=True)
    return address, load_word(record + 2) & 255, load_word(record + 4), weight


@triton.jit
def load_followers(record):
    """The units that follow a head, first and end.

    Not of the next turn of a loop: Triton 3.6 drops what a loop carries if nothing but the bounds
    of a loop inside needs it, and goes on with what the first turn had.
    """
    first = load_word(record + 6)
    return first, first + load_word(record + 7)


@triton.jit
def load_head(record):
    """A head's group, how many rows it has, and the first of them."""
    group = load_group(record)
    num_rows = load_word(record + 2) >> 16
    return group, num_rows, load_word(record + 3).to(tl.int64)


@triton.jit
def load_b(pool, group, first, count, width, N: tl.constexpr):
    """Columns first.. of a group [ranks, width], as [16, N]; `count` of them are there."""
    rank = tl.arange(0, 16)[:, None]
    column = tl.arange(0, N)[None, :]
    mask = (rank < group[1]) & (column < count)
    return tl.load(pool + group[0] + rank * width + first + column, mask=mask, other=0.0)


@triton.jit
def load_h(tail, group, num_rows, dtype, part_step=0, PARTS: tl.constexpr = 1):
    """weight * h of a group and a row: [16] float32. num_rows: 1, or 0 for a row of nobody

    tail: of the row, at the slice of the group's block   part_step: from a part of the product to
    the next
    """
    rank = tl.arange(0, 16)
    # A row without an adapter has no block: whatever there is may be no number.
    num_ranks = tl.where(group[1] > 0, num_rows * 16, 0)
    h = load_sum(tail + rank, rank < num_ranks, part_step, dtype, PARTS)
    return h.to(tl.float32) * group[3]


@triton.jit
def add_product(total, h, b):
    """total + h @ b of a row: [1, N] float32"""
    return total + tl.sum(b.to(tl.float32) * h[:, None], axis=0)[None, :]


@triton.jit
def add_followers(  # noqa: PLR0913
    total, units, pool, records, tail, h_step, num_rows, first, count, width,
    N: tl.constexpr, part_step=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """total [1, N] float32 with all that the followers of a head add to a row.

    records, tail: at the slice   units: of load_followers   h_step: from a block of the tail to
    the next
    """
    for unit in tl.range(units[0], units[1], num_stages=1):
        group = load_group(records + unit * 64)
        b = load_b(pool, group, first, count, width, N)
        h = load_h(tail + group[2] * h_step, group, num_rows, b.dtype, part_step, PARTS)
        total = add_product(total, h, b)
    return total


@triton.jit
def find_head(head, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A head's slice, its first output there, and the outputs of the slice."""
    is_query = head < NUM_QUERIES
    is_value = head >= NUM_QUERIES + KV_HEADS
    # Of the slice, in heads.
    start = tl.where(is_query, 0, tl.where(is_value, NUM_QUERIES + KV_HEADS, NUM_QUERIES))
    width = tl.where(is_query, NUM_QUERIES, KV_HEADS) * HEAD_DIM
    slice_index = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    return slice_index, (head - start) * HEAD_DIM, width


@triton.jit
def store_halves(  # noqa: PLR0913
    low, high, at, inside, slice_index, storage_ptr, slot, page_stride, layer_start, column,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Halves of a head to their place: queries to `at`, keys and values to pages.

    column: of the first half, in the slice
    """
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    if slice_index == 0:
        tl.store(at, low, mask=inside)
        tl.store(at + MIDDLE, high, mask=inside)
    else:
        block = (slot // BLOCK_TOKENS).to(tl.int64) * page_stride + layer_start
        # Values follow the keys of the whole block.
        token = slot % BLOCK_TOKENS + tl.where(slice_index == 2, BLOCK_TOKENS, 0)
        where = storage_ptr + block + token * (KV_HEADS * HEAD_DIM) + column
        tl.store(where, low, mask=inside & (slot >= 0))
        tl.store(where + MIDDLE, high, mask=inside & (slot >= 0))
