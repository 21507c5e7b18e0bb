"""Elementwise kernels that add h @ B first on tensor cores, for tiles of rows of the same adapters.

Tiles are the second axis of the grid. A CTA loads its tile's item in parallel with the number of
tiles; a CTA without a tile has loaded an item that it does not use. A tile has 16 rows, or (LOOPS)
more: then 16 rows are computed at a time, with the B that was loaded for the first ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import activate, inverse_rms, load_angles, load_sum
from loramux.kernels.gpu.lora.mma_layout import (
    fragment_columns,
    fragment_rows,
    load_b_fragments,
    load_h_fragments,
    mma_add,
    mma_add_next,
    sum_fragment_columns,
)
from loramux.kernels.gpu.lora.work_item import (
    ITEM_WORDS,
    RESOLVED_WORDS,
    TILE_FIRST,
    load_first_item,
    load_next_range,
    load_word,
)
from loramux.kernels.gpu.lora_augmented.rows import locate_head, store_halves
from loramux.kernels.gpu.pdl import pdl_wait_and_launch


@triton.jit
def _has_next(next_range):
    return next_range[0] < next_range[1]


# ---- expand ---------------------------------------------------------------------------------


@triton.jit
def _expand_rows(  # noqa: PLR0913
    b, first_item, next_range, offset, y_ptr, out_ptr, pool, items, split_stride, y_stride,
    out_stride, start, SIZE: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Expand 16 rows of a tile, from its row `offset` on."""
    block, rows, row_start = first_item
    rows -= offset
    row_start += offset
    row = fragment_rows()
    column = fragment_columns(WARPS, J)
    inside = (row < rows) & (column < SIZE - start)
    y = y_ptr + row_start * y_stride
    h_ptr = y + SIZE
    values = load_sum(
        y + row * y_stride + start + column, inside, split_stride, pool.dtype.element_ty, SPLITS
    )
    h = load_h_fragments(h_ptr, 16, y_stride, block, rows, b.dtype, WARPS, split_stride, SPLITS)
    total = mma_add(values.to(tl.float32), h, b, WARPS, J)
    total = mma_add_next(
        total, next_range, pool, items, h_ptr, y_stride, 16, rows, start, SIZE - start, SIZE,
        WARPS, J, split_stride, SPLITS,
    )  # fmt: skip
    out = out_ptr + (row_start + row) * out_stride + start + column
    tl.store(out, total.to(values.dtype), mask=inside)


@triton.jit
def _expand_tile(  # noqa: PLR0913
    first_item, next_range, is_first, y_ptr, out_ptr, pool, items, split_stride, y_stride,
    out_stride, start, SIZE: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    SPLITS: tl.constexpr, LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, rows, row_start = first_item
    if SPLITS == 1:
        is_changed = (block[1] > 0) | _has_next(next_range)
        first_item = block, tl.where(is_changed, rows, 0), row_start
    if EARLY_B:
        b = load_b_fragments(pool, block, start, SIZE - start, SIZE, WARPS, J)
    if is_first:
        pdl_wait_and_launch(PDL)
    if not EARLY_B:
        b = load_b_fragments(pool, block, start, SIZE - start, SIZE, WARPS, J)
    if LOOPS:
        for offset in tl.range(0, first_item[1], 16, num_stages=1):
            _expand_rows(
                b, first_item, next_range, offset, y_ptr, out_ptr, pool, items, split_stride,
                y_stride, out_stride, start, SIZE, WARPS, J, SPLITS,
            )  # fmt: skip
    else:
        _expand_rows(
            b, first_item, next_range, 0, y_ptr, out_ptr, pool, items, split_stride, y_stride,
            out_stride, start, SIZE, WARPS, J, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["all_rows"])
def expand_kernel(  # noqa: PLR0913
    y_ptr, out_ptr, pool, items, work, item_start, all_rows, y_stride, out_stride,
    SIZE: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr, SPLITS: tl.constexpr,
    LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write y + h @ B; without split-K in place, and unchanged rows are not written."""
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    items += item_start
    start = tl.program_id(0) * (WARPS * 8 * J)
    split_stride = all_rows.to(tl.int64) * y_stride
    num_tiles = load_word(work + TILE_FIRST)
    first_item = load_first_item(items + begin * RESOLVED_WORDS)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        next_range = load_next_range(items + tile * RESOLVED_WORDS)
        _expand_tile(
            first_item, next_range, tile == begin, y_ptr, out_ptr, pool, items, split_stride,
            y_stride, out_stride, start, SIZE, WARPS, J, SPLITS, LOOPS, EARLY_B, PDL,
        )  # fmt: skip
        first_item = load_first_item(items + (tile + step) * RESOLVED_WORDS)


# ---- activate_mul ---------------------------------------------------------------------------


@triton.jit
def _activate_rows(  # noqa: PLR0913
    b_gate, b_up, of_gate, of_up, next_ranges, offset, y_ptr, out_ptr, pool, items, y_stride,
    start, INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """Expand and activates 16 rows of a tile, from its row `offset` on."""
    rows = of_gate[1] - offset
    row_start = of_gate[2] + offset
    row = fragment_rows()
    column = fragment_columns(WARPS, J)
    count = INNER - start
    inside = (row < rows) & (column < count)
    h_ptr = y_ptr + row_start * y_stride + 2 * INNER
    at = y_ptr + (row_start + row) * y_stride + start + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + INNER, mask=inside, other=0.0)
    h_gate = load_h_fragments(h_ptr, 32, y_stride, of_gate[0], rows, b_gate.dtype, WARPS)
    h_up = load_h_fragments(h_ptr + 16, 32, y_stride, of_up[0], rows, b_up.dtype, WARPS)
    gate = mma_add(gate.to(tl.float32), h_gate, b_gate, WARPS, J)
    up = mma_add(up.to(tl.float32), h_up, b_up, WARPS, J)
    if HAS_NEXT:
        gate = mma_add_next(
            gate, next_ranges[0], pool, items, h_ptr, y_stride, 32, rows, start, count, INNER,
            WARPS, J,
        )  # fmt: skip
        up = mma_add_next(
            up, next_ranges[1], pool, items + ITEM_WORDS, h_ptr + 16, y_stride, 32, rows, start,
            count, INNER, WARPS, J,
        )  # fmt: skip
    mixed = activate(gate, ACTIVATION) * up
    out = out_ptr + (row_start + row) * INNER + start + column
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_tile(  # noqa: PLR0913
    of_gate, of_up, next_ranges, is_first, y_ptr, out_ptr, pool, items, y_stride, start,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    count = INNER - start
    if EARLY_B:
        b_gate = load_b_fragments(pool, of_gate[0], start, count, INNER, WARPS, J)
        b_up = load_b_fragments(pool, of_up[0], start, count, INNER, WARPS, J)
    if is_first:
        pdl_wait_and_launch(PDL)
    if not EARLY_B and not LOOPS:
        b_gate = load_b_fragments(pool, of_gate[0], start, count, INNER, WARPS, J)
        b_up = load_b_fragments(pool, of_up[0], start, count, INNER, WARPS, J)
    if not LOOPS:
        _activate_rows(
            b_gate, b_up, of_gate, of_up, next_ranges, 0, y_ptr, out_ptr, pool, items, y_stride,
            start, INNER, ACTIVATION, WARPS, J, True,
        )  # fmt: skip
    elif _has_next(next_ranges[0]) | _has_next(next_ranges[1]):
        # Registers do not hold B of two rank blocks: it is loaded again for every 16 rows.
        for offset in tl.range(0, of_gate[1], 16, num_stages=1):
            b_gate = load_b_fragments(pool, of_gate[0], start, count, INNER, WARPS, J)
            b_up = load_b_fragments(pool, of_up[0], start, count, INNER, WARPS, J)
            _activate_rows(
                b_gate, b_up, of_gate, of_up, next_ranges, offset, y_ptr, out_ptr, pool, items,
                y_stride, start, INNER, ACTIVATION, WARPS, J, True,
            )  # fmt: skip
    else:
        b_gate = load_b_fragments(pool, of_gate[0], start, count, INNER, WARPS, J)
        b_up = load_b_fragments(pool, of_up[0], start, count, INNER, WARPS, J)
        for offset in tl.range(0, of_gate[1], 16, num_stages=1):
            _activate_rows(
                b_gate, b_up, of_gate, of_up, next_ranges, offset, y_ptr, out_ptr, pool, items,
                y_stride, start, INNER, ACTIVATION, WARPS, J, False,
            )  # fmt: skip


@triton.jit
def activate_tiles_kernel(  # noqa: PLR0913
    y_ptr, out_ptr, pool, items, work, item_start, y_stride, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr, LOOPS: tl.constexpr,
    EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """activation(gate + h @ B) * (up + h @ B) of the tiles."""
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    items += item_start
    start = tl.program_id(0) * (WARPS * 8 * J)
    num_tiles = load_word(work + TILE_FIRST)
    item = items + begin * RESOLVED_WORDS
    of_gate = load_first_item(item)
    of_up = load_first_item(item + ITEM_WORDS)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        item = items + tile * RESOLVED_WORDS
        next_ranges = load_next_range(item), load_next_range(item + ITEM_WORDS)
        _activate_tile(
            of_gate, of_up, next_ranges, tile == begin, y_ptr, out_ptr, pool, items, y_stride,
            start, INNER, ACTIVATION, WARPS, J, LOOPS, EARLY_B, PDL,
        )  # fmt: skip
        item = items + (tile + step) * RESOLVED_WORDS
        of_gate = load_first_item(item)
        of_up = load_first_item(item + ITEM_WORDS)


# ---- rotate_write ---------------------------------------------------------------------------


@triton.jit
def _norm_halves(low, high, at, eps, inside, HEAD_DIM: tl.constexpr):
    """Return the halves of a head, normed; `at` points to the weights of the first
    half's columns.
    """
    inverse = inverse_rms(sum_fragment_columns(low * low + high * high), eps, HEAD_DIM)
    low *= inverse * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high *= inverse * tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _rotate_rows(  # noqa: PLR0913
    b_low, b_high, first_item, next_range, offset, y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr,
    norm_ptr, pool, items, y_stride, page_stride, layer_start, eps, head, slice_index, start,
    width, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Rotates and writes 16 rows of a tile, from its row `offset` on."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    OUTPUTS: tl.constexpr = (NUM_QUERIES + 2 * KV_HEADS) * HEAD_DIM
    block, rows, row_start = first_item
    rows -= offset
    row_start += offset
    row = fragment_rows()
    dim = fragment_columns(WARPS, J)
    inside = (row < rows) & (dim < MIDDLE)
    h_ptr = y_ptr + row_start * y_stride + OUTPUTS + slice_index * 16
    at = y_ptr + (row_start + row) * y_stride + head * HEAD_DIM + dim
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + MIDDLE, mask=inside, other=0.0)
    h = load_h_fragments(h_ptr, 48, y_stride, block, rows, b_low.dtype, WARPS)
    slot = tl.load(slots_ptr + row_start + row, mask=row < rows, other=-1)
    is_rotated = (row < tl.where(slice_index == 2, 0, rows)) & (dim < MIDDLE)
    angle_at = (row_start + row) * HEAD_DIM + dim
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_at, is_rotated, MIDDLE)
    low = mma_add(low.to(tl.float32), h, b_low, WARPS, J)
    high = mma_add(high.to(tl.float32), h, b_high, WARPS, J)
    low = mma_add_next(
        low, next_range, pool, items, h_ptr, y_stride, 48, rows, start, MIDDLE, width, WARPS, J
    )
    high = mma_add_next(
        high, next_range, pool, items, h_ptr, y_stride, 48, rows, start + MIDDLE, MIDDLE, width,
        WARPS, J,
    )  # fmt: skip
    if slice_index < 2:
        if norm_ptr is not None:
            weight = norm_ptr + head * HEAD_DIM + dim
            low, high = _norm_halves(low, high, weight, eps, dim < MIDDLE, HEAD_DIM)
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    store_halves(
        low.to(y_ptr.dtype.element_ty), high.to(y_ptr.dtype.element_ty), at, inside, slice_index,
        storage_ptr, slot, page_stride, layer_start, start + dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
    )  # fmt: skip


@triton.jit
def rotate_tiles_kernel(  # noqa: PLR0913
    y_ptr, cos_ptr, sin_ptr, storage_ptr, slots_ptr, norm_ptr, pool, items, work, item_start,
    y_stride, page_stride, layer_start, eps, NUM_QUERIES: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    LOOPS: tl.constexpr, EARLY_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotates and writes qkv + h @ B of the tiles, one head (both halves) per CTA."""
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    head = tl.program_id(0)
    slice_index, start, width = locate_head(head, NUM_QUERIES, KV_HEADS, HEAD_DIM)
    items += item_start + slice_index * ITEM_WORDS
    num_tiles = load_word(work + TILE_FIRST)
    first_item = load_first_item(items + begin * RESOLVED_WORDS)
    for tile in tl.range(begin, num_tiles, step, num_stages=1):
        next_range = load_next_range(items + tile * RESOLVED_WORDS)
        if EARLY_B:
            b_low = load_b_fragments(pool, first_item[0], start, MIDDLE, width, WARPS, J)
            b_high = load_b_fragments(pool, first_item[0], start + MIDDLE, MIDDLE, width, WARPS, J)
        if tile == begin:
            pdl_wait_and_launch(PDL)
        if not EARLY_B:
            b_low = load_b_fragments(pool, first_item[0], start, MIDDLE, width, WARPS, J)
            b_high = load_b_fragments(pool, first_item[0], start + MIDDLE, MIDDLE, width, WARPS, J)
        num_parts = tl.cdiv(first_item[1], 16) if LOOPS else 1
        for part in tl.range(0, num_parts, num_stages=1):
            _rotate_rows(
                b_low, b_high, first_item, next_range, part * 16, y_ptr, cos_ptr, sin_ptr,
                storage_ptr, slots_ptr, norm_ptr, pool, items, y_stride, page_stride, layer_start,
                eps, head, slice_index, start, width, NUM_QUERIES, KV_HEADS, HEAD_DIM,
                BLOCK_TOKENS, WARPS, J,
            )  # fmt: skip
        first_item = load_first_item(items + (tile + step) * RESOLVED_WORDS)
