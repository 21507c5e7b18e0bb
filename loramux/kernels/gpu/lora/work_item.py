"""How kernels read a step's work items, and how CTAs share the tiles of a launch.

A resolved work item is ITEM_WORDS words for each projection; `items + i * RESOLVED_WORDS` is item i
at the projection that `items` points to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora import work_list

# The format of the work list, as constants of the kernels.
HEADER_WORDS: tl.constexpr = tl.constexpr(work_list.HEADER_WORDS)
ROW_FIRST: tl.constexpr = tl.constexpr(work_list.ROW_FIRST)
ROW_ITEMS: tl.constexpr = tl.constexpr(work_list.ROW_ITEMS)
TILE_FIRST: tl.constexpr = tl.constexpr(work_list.TILE_FIRST)
TILE_ITEMS: tl.constexpr = tl.constexpr(work_list.TILE_ITEMS)
FIRST_USED: tl.constexpr = tl.constexpr(work_list.FIRST_USED)
SMALL_FIRST: tl.constexpr = tl.constexpr(work_list.SMALL_FIRST)
SMALL_ITEMS: tl.constexpr = tl.constexpr(work_list.SMALL_ITEMS)
BASE_TILES: tl.constexpr = tl.constexpr(work_list.BASE_TILES)
ITEM_WORDS: tl.constexpr = tl.constexpr(work_list.ITEM_WORDS)
PROJECTIONS: tl.constexpr = tl.constexpr(work_list.MAX_PROJECTIONS)
RESOLVED_WORDS: tl.constexpr = tl.constexpr(work_list.MAX_PROJECTIONS * work_list.ITEM_WORDS)
SLOT: tl.constexpr = tl.constexpr(work_list.SLOT)
BLOCK_INDEX: tl.constexpr = tl.constexpr(work_list.BLOCK_INDEX)
A_ADDRESS: tl.constexpr = tl.constexpr(work_list.A_ADDRESS)
B_ADDRESS: tl.constexpr = tl.constexpr(work_list.B_ADDRESS)
NUM_ROWS: tl.constexpr = tl.constexpr(work_list.NUM_ROWS)
ROW_START: tl.constexpr = tl.constexpr(work_list.ROW_START)
H_START: tl.constexpr = tl.constexpr(work_list.H_START)
WEIGHT: tl.constexpr = tl.constexpr(work_list.WEIGHT)
NEXT_START: tl.constexpr = tl.constexpr(work_list.NEXT_START)
NUM_NEXT: tl.constexpr = tl.constexpr(work_list.NUM_NEXT)
# Addresses count units of so many elements, or of half as many 32-bit words.
ALIGN: tl.constexpr = tl.constexpr(work_list.ALIGN_ELEMENTS)
# The device's directory: words of a rank block's entry, and of a slot's first block and count.
ENTRY_WORDS: tl.constexpr = tl.constexpr(work_list.ENTRY_WORDS)
RANGE_WORDS: tl.constexpr = tl.constexpr(work_list.RANGE_WORDS)


@triton.jit
def load_word(at, live=True):
    """Load a word of the tables; it should outlive the weights in the L2 cache."""
    return tl.load(at, mask=live, other=0, eviction_policy="evict_last")


@triton.jit
def num_ranks(shape):
    """Ranks of a resolved item's NUM_ROWS word."""
    return shape & 255


@triton.jit
def num_rows(shape):
    """Rows of a resolved item's NUM_ROWS word."""
    return shape >> 16


@triton.jit
def load_block(item):
    """Load a rank block: (offset of B in the pool, ranks, H_START, weight).

    H_START is the item's first row of h, or its rank block of augmented weights. All words of an
    item are requested before any of them is used.
    """
    address = load_word(item + B_ADDRESS).to(tl.int64) * ALIGN
    weight = load_word(item + WEIGHT).to(tl.float32, bitcast=True)
    return address, num_ranks(load_word(item + NUM_ROWS)), load_word(item + H_START), weight


@triton.jit
def load_next_range(item):
    """Load the range (start, stop) of the next rank blocks of a first item's rows.

    Call it in the iteration that uses it: Triton 3.6 drops a loop-carried value that only the
    bounds of an inner loop use, and goes on with the value of the first iteration.
    """
    start = load_word(item + NEXT_START)
    return start, start + load_word(item + NUM_NEXT)


@triton.jit
def load_first_item(item):
    """Load a first item: its rank block, its number of rows, and its first row."""
    block = load_block(item)
    rows = num_rows(load_word(item + NUM_ROWS))
    return block, rows, load_word(item + ROW_START).to(tl.int64)


@triton.jit
def is_site_used(work, item_start, num_slices):
    """1 if an adapter of the step changes the site whose items begin at item_start, else 0."""
    slice_index = tl.arange(0, 4)
    used = work + FIRST_USED + item_start % RESOLVED_WORDS // ITEM_WORDS
    return tl.max(tl.load(used + slice_index, mask=slice_index < num_slices, other=0), 0)


@triton.jit
def skip_gap(index, gap):
    """Return the position of the index-th item in a range with a gap (start, length)."""
    return index + tl.where(index >= gap[0], gap[1], 0)


@triton.jit
def locate_rows_tile(tile, num_tiles, items, num_items, gap, SLICES: tl.constexpr):
    """Locates a shrink tile of few rows: part, slice, A's address, shape word, first row, H_START.

    Consecutive tiles are consecutive items, so that items with fewer ranks are spread over all
    CTAs.
    """
    per_part = tl.maximum(num_items * SLICES, 1)
    part = tile // per_part
    index = tile - part * per_part
    slice_index = index // tl.maximum(num_items, 1)
    position = skip_gap(index - slice_index * num_items, gap)
    item = items + (position * PROJECTIONS + slice_index) * ITEM_WORDS
    live = tile < num_tiles
    address = load_word(item + A_ADDRESS, live)
    shape = load_word(item + NUM_ROWS, live)
    row_start = load_word(item + ROW_START, live)
    return part, slice_index, address, shape, row_start, load_word(item + H_START, live)


# A launch takes as long as its busiest CTA: each phase of tiles starts with the CTAs that had the
# fewest tiles in the phase before.


@triton.jit
def tile_of_wave(wave):
    """Return this CTA's tile in a wave; the direction alternates from wave to wave.

    The longest tiles come first in the list, so that all CTAs get about the same work.
    """
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return wave * programs + tl.where(wave % 2 == 0, program, programs - 1 - program)


@triton.jit
def rank_after_waves(num_tiles):
    """Return this CTA's rank for the next phase after num_tiles were assigned by tile_of_wave."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return tl.where(tl.cdiv(num_tiles, programs) % 2 == 0, program, programs - 1 - program)


@triton.jit
def rank_after(rank, num_tiles):
    """Return this CTA's rank for the next phase after num_tiles were assigned round
    robin by rank.
    """
    programs = tl.num_programs(0)
    return (rank + programs - num_tiles % programs) % programs
