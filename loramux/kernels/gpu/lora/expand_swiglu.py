"""expand of gate and up, and the activation behind them, for all rows of a step's work list.

What adapters add is activated where it is added up: nobody writes y, to read it again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.elementwise import activate
from loramux.kernels.gpu.lora.expand_mma import sum_tile, tile_places
from loramux.kernels.gpu.lora.expand_rows import load_few_b, store_few, sum_few
from loramux.kernels.gpu.lora.mma_layout import load_ordered_b
from loramux.kernels.gpu.lora.tile_schedule import place_behind, place_behind_turns, tile_of_turn
from loramux.kernels.gpu.lora.work_item import BASE_TILES, HEADER_WORDS, load_word
from loramux.kernels.gpu.lora_augmented.rank_block import load_followers, load_group, load_head
from loramux.kernels.gpu.pdl import pdl_wait


@triton.jit
def _activate_few(  # noqa: PLR0913
    b, groups, followers, pool, records, partials, y, out, y_stride, num_rows, first,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """b, groups, followers: gate's and up's"""
    gates = sum_few(
        b[0], groups[0], followers[0], pool, records, partials, y, y_stride, num_rows, first, INNER,
        N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    ups = sum_few(
        b[1], groups[1], followers[1], pool, records + 8, partials + MAX_SPLITS * 16, y + INNER,
        y_stride, num_rows, first, INNER, N, ROWS, MAX_SPLITS, SPLITS,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        mixed = activate(gates[row], ACTIVATION) * ups[row]
        store_few(mixed, out + row * INNER, row, num_rows, first, INNER, N)


@triton.jit
def _expand_few(  # noqa: PLR0913
    tile, num_heads, pool, records, partials, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    head = tile // CHUNKS
    first = (tile - head * CHUNKS) * N
    # Who has none in the last turn reads the last one's, for nothing.
    record = records + tl.minimum(head, num_heads - 1) * 64
    of_gate, num_rows, row_start = load_head(record)
    groups = of_gate, load_group(record + 8)
    followers = load_followers(record), load_followers(record + 8)
    b = (
        load_few_b(pool, groups[0], first, INNER, N),
        load_few_b(pool, groups[1], first, INNER, N),
    )
    pdl_wait(PDL)
    num_rows = tl.where(head < num_heads, num_rows, 0)
    y += row_start * y_stride
    out += row_start * INNER
    if num_rows == 1:
        _activate_few(
            b, groups, followers, pool, records, partials, y, out, y_stride, 1, first,
            INNER, ACTIVATION, N, 1, MAX_SPLITS, SPLITS,
        )  # fmt: skip
    elif num_rows > 1:
        _activate_few(
            b, groups, followers, pool, records, partials, y, out, y_stride, num_rows, first,
            INNER, ACTIVATION, N, ROWS, MAX_SPLITS, SPLITS,
        )  # fmt: skip


@triton.jit
def _expand_tile(  # noqa: PLR0913
    tile, pool, records, of_heads, partials, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, SMALL_SPLITS: tl.constexpr,
    SMALL_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """of_heads: records of the first tile"""
    N: tl.constexpr = WARPS * 8 * J
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    head = tile // CHUNKS
    first = (tile - head * CHUNKS) * N
    record = of_heads + head * 64
    of_gate, num_rows, row_start = load_head(record)
    of_up = load_group(record + 8)
    gate_more = load_followers(record)
    up_more = load_followers(record + 8)
    b_gate = load_ordered_b(pool, of_gate, first, INNER - first, INNER, WARPS, J)
    b_up = load_ordered_b(pool, of_up, first, INNER - first, INNER, WARPS, J)
    pdl_wait(PDL)
    row, column, inside = tile_places(num_rows, first, INNER, WARPS, J)
    at = y + (row_start + row) * y_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + INNER, mask=inside, other=0.0)
    gate = sum_tile(
        gate, b_gate, of_gate, gate_more, pool, records, partials, num_rows, first, INNER,
        WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    up = sum_tile(
        up, b_up, of_up, up_more, pool, records + 8, partials + MAX_SPLITS * 16, num_rows, first,
        INNER, WARPS, J, MAX_SPLITS, SPLITS, SMALL_SPLITS, SMALL_ROWS,
    )  # fmt: skip
    mixed = activate(gate, ACTIVATION) * up
    target = out + (row_start + row) * INNER + column
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate_base(  # noqa: PLR0913
    tile, units, y, out, y_stride,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Rows without an adapter. units: of the list, behind all others"""
    N: tl.constexpr = WARPS * 8 * J
    CHUNKS: tl.constexpr = (INNER + N - 1) // N
    unit = units + tile // CHUNKS * 8
    row, column, inside = tile_places(load_word(unit + 2), tile % CHUNKS * N, INNER, WARPS, J)
    row = load_word(unit + 3).to(tl.int64) + row
    at = y + row * y_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    mixed = activate(gate, ACTIVATION) * up
    tl.store(out + row * INNER + column, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_swiglu_kernel(  # noqa: PLR0913
    pool,
    records,
    work,
    partials,
    y,
    out,
    record_start,
    y_stride,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ROW_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    ROW_N: tl.constexpr,
    WARPS: tl.constexpr,
    J: tl.constexpr,
    PDL: tl.constexpr,
):
    """As lora_expand_triton's expand_kernel; then the base's rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_heads = load_word(work)
    row_units = load_word(work + 1)
    tile_heads = load_word(work + 2)
    tile_units = load_word(work + 3)
    num_base = load_word(work + BASE_TILES)
    records += record_start
    programs = tl.num_programs(0)
    num_tiles = row_heads * ((INNER + ROW_N - 1) // ROW_N)
    for turn in tl.range(tl.cdiv(num_tiles, programs), num_stages=1):
        _expand_few(
            tile_of_turn(turn), row_heads, pool, records, partials, y, out, y_stride,
            INNER, ACTIVATION, ROW_N, ROWS, MAX_SPLITS, ROW_SPLITS, PDL,
        )  # fmt: skip
    place = place_behind_turns(num_tiles)
    chunks = (INNER + WARPS * 8 * J - 1) // (WARPS * 8 * J)
    num_tiles = tile_heads * chunks
    for tile in tl.range(place, num_tiles, programs, num_stages=1):
        _expand_tile(
            tile, pool, records, records + row_units * 64, partials, y, out, y_stride,
            INNER, ACTIVATION, WARPS, J, MAX_SPLITS, TILE_SPLITS, ROW_SPLITS, SMALL_ROWS, PDL,
        )  # fmt: skip
    pdl_wait(PDL)
    units = work + HEADER_WORDS + (row_units + tile_units) * 8
    place = place_behind(place, num_tiles)
    for tile in tl.range(place, num_base * chunks, programs, num_stages=1):
        _activate_base(tile, units, y, out, y_stride, INNER, ACTIVATION, WARPS, J)
