"""What a list's adapters add to few rows, by vector units: a lane has all ranks of its outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.lora.tables import OUTPUTS_PER_THREAD
from loramux.kernels.gpu.lora_augmented.rank_block import load_group
from loramux.kernels.gpu.pdl import LANES_FIRST, axis

_SIDE: tl.constexpr = tl.constexpr(OUTPUTS_PER_THREAD)


@triton.jit
def few_columns(N: tl.constexpr):
    """0 .. N; the axes: lanes, ranks, outputs side by side"""
    return axis(N // _SIDE, 0, 3, LANES_FIRST) * _SIDE + axis(_SIDE, 2, 3, LANES_FIRST)


@triton.jit
def load_few_b(pool, group, first, width, N: tl.constexpr):
    """N columns, from first on, of a group [ranks, width]; in the cache behind all else."""
    rank = axis(16, 1, 3, LANES_FIRST)
    column = first + few_columns(N)
    mask = (rank < group[1]) & (column < width)
    source = pool + group[0] + rank * width + column
    return tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_row_h(  # noqa: PLR0913
    partials, group, row, num_rows, dtype, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """weight * h [16] of one row, rounded as the matrix units do it: a row alone and a row in a
    tile get the same."""
    rank = tl.arange(0, 16)
    h = partials + (group[2] + row).to(tl.int64) * (3 * MAX_SPLITS * 16)
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
    num_ranks = tl.where(row < num_rows, group[1], 0)
    mask = (split < SPLITS) & (rank < num_ranks)[None, :]
    sums = tl.sum(tl.load(h + split * 16 + rank[None, :], mask=mask, other=0.0), 0)
    return (sums * group[3]).to(dtype).to(tl.float32)


@triton.jit
def _multiply(h, b):
    """h @ b of a row, h [16]"""
    if LANES_FIRST:
        product = tl.sum(b.to(tl.float32) * h[None, :, None], 1, keep_dims=True)
    else:
        product = tl.sum(b.to(tl.float32) * h[:, None, None], 0, keep_dims=True)
    return product


@triton.jit
def sum_few(  # noqa: PLR0913
    b, group, followers, pool, records, partials, y, y_stride, num_rows, first, width,
    N: tl.constexpr, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y + h @ b of up to ROWS rows, with what follows their head: one tensor for each, float32.

    b, group, followers: of the head   records, partials: at the slice   y: at the head's first row
    """
    column = first + few_columns(N)
    values: tl.tuple = ()
    for row in tl.static_range(ROWS):
        inside = column < tl.where(row < num_rows, width, 0)
        value = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        h = _load_row_h(partials, group, row, num_rows, b.dtype, MAX_SPLITS, SPLITS)
        values = values + (value + _multiply(h, b),)
    for unit in tl.range(followers[0], followers[1], num_stages=1):
        more = load_group(records + unit * 64)
        more_b = load_few_b(pool, more, first, width, N)
        added: tl.tuple = ()
        for row in tl.static_range(ROWS):
            h = _load_row_h(partials, more, row, num_rows, b.dtype, MAX_SPLITS, SPLITS)
            added = added + (values[row] + _multiply(h, more_b),)
        values = added
    return values


@triton.jit
def store_few(value, target, row, num_rows, first, width, N: tl.constexpr):
    """One of sum_few's, if there is such a row. target: of that row"""
    column = first + few_columns(N)
    inside = column < tl.where(row < num_rows, width, 0)
    tl.store(target + column, value.to(target.dtype.element_ty), mask=inside)
