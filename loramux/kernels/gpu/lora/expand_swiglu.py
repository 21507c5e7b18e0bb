"""SwiGLU-fused expand: adds h @ B to gate and up, and writes activation(gate) * up.

The sums stay in registers: y with its adapters is never written to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import activate
from loramux.kernels.gpu.lora.expand import expand_row_sums, load_row_b, store_row
from loramux.kernels.gpu.lora.expand_mma import expand_tile_sums, tile_coordinates
from loramux.kernels.gpu.lora.mma_layout import load_b_fragments
from loramux.kernels.gpu.lora.work_item import (
    BASE_TILES,
    HEADER_WORDS,
    ITEM_WORDS,
    NUM_ROWS,
    RESOLVED_WORDS,
    ROW_FIRST,
    ROW_ITEMS,
    ROW_START,
    TILE_FIRST,
    TILE_ITEMS,
    load_block,
    load_first_item,
    load_next_range,
    load_word,
    rank_after,
    rank_after_waves,
    tile_of_wave,
)
from loramux.kernels.gpu.pdl import pdl_wait


@triton.jit
def _activate_rows(  # noqa: PLR0913
    b, blocks, next_ranges, pool, items, partials, y, out, y_stride, rows, start,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Expand and activates up to ROWS rows; b, blocks, next_ranges: (of gate, of up)."""
    gates = expand_row_sums(
        b[0], blocks[0], next_ranges[0], pool, items, partials, y, y_stride, rows, start, INNER,
        N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    ups = expand_row_sums(
        b[1], blocks[1], next_ranges[1], pool, items + ITEM_WORDS, partials + MAX_SPLITS * 16,
        y + INNER, y_stride, rows, start, INNER, N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        mixed = activate(gates[row], ACTIVATION) * ups[row]
        store_row(mixed, out + row * INNER, row, rows, start, INNER, N)


@triton.jit
def _expand_rows(  # noqa: PLR0913
    tile, num_first, pool, items, partials, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    index = tile // CHUNKS
    start = (tile - index * CHUNKS) * N
    # CTAs without a tile in the last wave clamp to the last item; their result is masked.
    item = items + tl.minimum(index, num_first - 1) * RESOLVED_WORDS
    of_gate, rows, row_start = load_first_item(item)
    blocks = of_gate, load_block(item + ITEM_WORDS)
    next_ranges = load_next_range(item), load_next_range(item + ITEM_WORDS)
    b = (
        load_row_b(pool, blocks[0], start, INNER, N),
        load_row_b(pool, blocks[1], start, INNER, N),
    )
    pdl_wait(PDL)
    rows = tl.where(index < num_first, rows, 0)
    y += row_start * y_stride
    out += row_start * INNER
    if rows == 1:
        _activate_rows(
            b, blocks, next_ranges, pool, items, partials, y, out, y_stride, 1, start,
            INNER, ACTIVATION, N, 1, MAX_SPLITS, SPLITS,
        )  # fmt: skip
    elif rows > 1:
        _activate_rows(
            b, blocks, next_ranges, pool, items, partials, y, out, y_stride, rows, start,
            INNER, ACTIVATION, N, ROWS, MAX_SPLITS, SPLITS,
        )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    tile, pool, items, first_items, partials, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, SMALL_SPLITS: tl.constexpr,
    SMALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Expand and activates a tile; first_items points to the first item that is a tile."""
    N: tl.constexpr = WARPS * 8 * J
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    index = tile // CHUNKS
    start = (tile - index * CHUNKS) * N
    item = first_items + index * RESOLVED_WORDS
    of_gate, rows, row_start = load_first_item(item)
    of_up = load_block(item + ITEM_WORDS)
    next_gate = load_next_range(item)
    next_up = load_next_range(item + ITEM_WORDS)
    b_gate = load_b_fragments(pool, of_gate, start, INNER - start, INNER, WARPS, J)
    b_up = load_b_fragments(pool, of_up, start, INNER - start, INNER, WARPS, J)
    pdl_wait(PDL)
    row, column, inside = tile_coordinates(rows, start, INNER, WARPS, J)
    at = y + (row_start + row) * y_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + INNER, mask=inside, other=0.0)
    gate = expand_tile_sums(
        gate, b_gate, of_gate, next_gate, pool, items, partials, rows, start, INNER,
        WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    up = expand_tile_sums(
        up, b_up, of_up, next_up, pool, items + ITEM_WORDS, partials + MAX_SPLITS * 16, rows, start,
        INNER, WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    mixed = activate(gate, ACTIVATION) * up
    target = out + (row_start + row) * INNER + column
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate_base(  # noqa: PLR0913
    tile, base_items, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Activates rows without an adapter; base_items: of the work list, behind all other items."""
    N: tl.constexpr = WARPS * 8 * J
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    item = base_items + tile // CHUNKS * ITEM_WORDS
    rows = load_word(item + NUM_ROWS)
    row, column, inside = tile_coordinates(rows, tile % CHUNKS * N, INNER, WARPS, J)
    row = load_word(item + ROW_START).to(tl.int64) + row
    at = y + row * y_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    mixed = activate(gate, ACTIVATION) * up
    tl.store(out + row * INNER + column, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_swiglu_kernel(  # noqa: PLR0913
    pool, items, work, partials, y, out, item_start, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ROW_SPLITS: tl.constexpr, TILE_SPLITS: tl.constexpr, ROWS: tl.constexpr,
    SMALL_ROWS: tl.constexpr, ROW_N: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Expand first items of few rows, then tiles, then activates rows without an adapter."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_first = load_word(work + ROW_FIRST)
    row_items = load_word(work + ROW_ITEMS)
    tile_first = load_word(work + TILE_FIRST)
    tile_items = load_word(work + TILE_ITEMS)
    num_base = load_word(work + BASE_TILES)
    items += item_start
    programs = tl.num_programs(0)
    num_tiles = row_first * ((INNER + ROW_N - 1) // ROW_N)
    for wave in tl.range(tl.cdiv(num_tiles, programs), num_stages=1):
        _expand_rows(
            tile_of_wave(wave), row_first, pool, items, partials, y, out, y_stride,
            INNER, ACTIVATION, ROW_N, ROWS, MAX_SPLITS, ROW_SPLITS, PDL,
        )  # fmt: skip
    rank = rank_after_waves(num_tiles)
    chunks = (INNER + WARPS * 8 * J - 1) // (WARPS * 8 * J)
    num_tiles = tile_first * chunks
    for tile in tl.range(rank, num_tiles, programs, num_stages=1):
        _expand_tile(
            tile, pool, items, items + row_items * RESOLVED_WORDS, partials, y, out, y_stride,
            INNER, ACTIVATION, WARPS, J, MAX_SPLITS, TILE_SPLITS, ROW_SPLITS, SMALL_ROWS, PDL,
        )  # fmt: skip
    pdl_wait(PDL)
    base_items = work + HEADER_WORDS + (row_items + tile_items) * ITEM_WORDS
    rank = rank_after(rank, num_tiles)
    for tile in tl.range(rank, num_base * chunks, programs, num_stages=1):
        _activate_base(tile, base_items, y, out, y_stride, INNER, ACTIVATION, WARPS, J)
