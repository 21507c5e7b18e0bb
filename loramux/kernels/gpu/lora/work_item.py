"""What kernels read of a step's records."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora import work_list as lora_work

# Of the list's beginning, as kernels want constants.
HEADER_WORDS: tl.constexpr = tl.constexpr(lora_work.HEADER_WORDS)
SMALL_HEADS: tl.constexpr = tl.constexpr(lora_work.SMALL_HEADS)
SMALL_UNITS: tl.constexpr = tl.constexpr(lora_work.SMALL_UNITS)
BASE_TILES: tl.constexpr = tl.constexpr(lora_work.BASE_TILES)


@triton.jit
def load_word(record, live=True):
    """Of the tables, which should outlive the weights in the cache."""
    return tl.load(record, mask=live, other=0, eviction_policy="evict_last")


@triton.jit
def is_site_used(work, record_start, num_slices):
    """1 if any adapter of the step changes the site whose records begin there, else 0."""
    slice_index = tl.arange(0, 4)
    first = work + 4 + record_start % 64 // 8
    used = tl.load(first + slice_index, mask=slice_index < num_slices, other=0)
    return tl.max(used, 0)


@triton.jit
def skip(index, gap):
    """The index-th of units that are neighbours but for a gap: where it begins, and its length."""
    return index + tl.where(index >= gap[0], gap[1], 0)


@triton.jit
def find_few(tile, num_tiles, records, num_units, gap, SLICES: tl.constexpr):
    """Of a tile of few rows: its part and slice; A's address, ranks + rows * 2^16, its first row
    and the first of its h.

    Neighbours are units, so that those with fewer ranks than others are dealt to all programs.
    """
    per_part = tl.maximum(num_units * SLICES, 1)
    part = tile // per_part
    index = tile - part * per_part
    slice_index = index // tl.maximum(num_units, 1)
    record = records + (skip(index - slice_index * num_units, gap) * 8 + slice_index) * 8
    live = tile < num_tiles
    address = load_word(record, live)
    shape = load_word(record + 2, live)
    row_start = load_word(record + 3, live)
    return part, slice_index, address, shape, row_start, load_word(record + 4, live)
