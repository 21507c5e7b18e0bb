"""How kernels read the tables of extras."""

from __future__ import annotations

import triton
import triton.language as tl

from loramux.kernels.gpu.extras import tables
from loramux.kernels.gpu.lora.work_list import ALIGN_ELEMENTS

HEADER_WORDS: tl.constexpr = tl.constexpr(tables.HEADER_WORDS)
ROW_WORDS: tl.constexpr = tl.constexpr(tables.ROW_WORDS)
ENTRY_WORDS: tl.constexpr = tl.constexpr(tables.ENTRY_WORDS)
VECTOR_WORDS: tl.constexpr = tl.constexpr(tables.VECTOR_WORDS)
MATRIX_WORDS: tl.constexpr = tl.constexpr(tables.MATRIX_WORDS)
NUM_ROWS: tl.constexpr = tl.constexpr(tables.NUM_ROWS)
WIDTH: tl.constexpr = tl.constexpr(tables.WIDTH)
ROWS_PER_PAGE: tl.constexpr = tl.constexpr(tables.ROWS_PER_PAGE)
START: tl.constexpr = tl.constexpr(tables.START)
PAGES: tl.constexpr = tl.constexpr(tables.PAGES)
TOKENS: tl.constexpr = tl.constexpr(tables.TOKENS)
ALIGN: tl.constexpr = tl.constexpr(ALIGN_ELEMENTS)


@triton.jit
def load_row(words, row):
    """Return the range (first, stop) of a row's entries."""
    at = words + HEADER_WORDS + row * ROW_WORDS
    first = tl.load(at)
    return first, first + tl.load(at + 1)


@triton.jit
def load_entry(words, entries_at, index):
    """Return the (slot, weight) of an entry."""
    at = words + entries_at + index * ENTRY_WORDS
    return tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.float32, bitcast=True)


@triton.jit
def row_offset(heap, matrix, row, width, PAGE: tl.constexpr):
    """Return the offsets of rows of a matrix in the pool; rows of a missing matrix must be 0."""
    per_page = tl.maximum(tl.load(matrix + ROWS_PER_PAGE), 1)
    number = row // per_page
    page = tl.load(heap + tl.load(matrix + PAGES) + number).to(tl.int64)
    start = tl.load(matrix + START).to(tl.int64) * ALIGN
    return page * PAGE + start + (row - number * per_page).to(tl.int64) * width
