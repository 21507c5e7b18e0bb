"""Device tables of extras, and a step's list of the rows and adapters they act on.

An adapter with such parts has a slot. `vectors` holds the addresses of its gains and biases, and
`matrices` describes its weights, whose rows lie in pages that `heap` lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.gpu.lora.work_list import WorkListFull
from loramux.types.model import LinearSpec

Ints = NDArray[np.int32]

# Vectors of a layer: of its norms, then of its linears in their order; the final norm's follow
# those of all layers. A vector has (address of the gain, address of the bias) in units of
# ALIGN_ELEMENTS, or NO_VECTOR.
ATTENTION_NORM, MLP_NORM = range(2)
_NUM_NORMS = 2
VECTOR_WORDS = 2
NO_VECTOR = -1
# Matrices of a layer: of the projections of its linears, in their order; those of the model follow
# all layers.
EMBED_WEIGHT, EMBED_ROWS, EMBED_A, EMBED_B = range(4)
HEAD_WEIGHT, HEAD_ROWS, HEAD_A, HEAD_B, HEAD_GAIN, HEAD_BIAS = range(4, 10)
NUM_MODEL_MATRICES = 10
# A matrix: rows (0: the adapter has none), width, rows in a page, start in its first page in units
# of ALIGN_ELEMENTS, and where the heap lists its pages and, for replaced rows, its tokens.
MATRIX_WORDS = 8
NUM_ROWS, WIDTH, ROWS_PER_PAGE, START, PAGES, TOKENS = range(6)
MAX_HEAD_RANK = 512
"""Largest rank of a low rank at the output head."""

# The list of a step: a header with the number of tiles; (first entry, number of entries) of each
# row; entries (slot, bits of the weight), shared by rows of one selection; and tiles of rows that
# read matrices of one slot. Tiles of the same rows are adjacent; the first one has their number.
HEADER_WORDS = 16
ROW_WORDS = 2
ENTRY_WORDS = 2
TILE_WORDS = 8
TILE_SLOT, TILE_START, TILE_NUM_ROWS, TILE_WEIGHT, TILE_H_START, TILE_CHAIN = range(6)


class LayerNumbers:
    """Numbers of the vectors and matrices of a layer with these linears."""

    def __init__(self, linears: Sequence[LinearSpec]) -> None:
        self.vector_of = {spec.name: _NUM_NORMS + site for site, spec in enumerate(linears)}
        self.num_vectors = _NUM_NORMS + len(linears)
        names = [name for spec in linears for name in spec.projections]
        self.matrix_of = {name: number for number, name in enumerate(names)}
        self.num_matrices = len(names)

    def vector(self, layer: int, number: int) -> int:
        return layer * self.num_vectors + number

    def matrix(self, layer: int, projection: str) -> int:
        return layer * self.num_matrices + self.matrix_of[projection]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtrasLimits:
    """The most that a step's list may hold."""

    max_rows: int
    max_entries: int
    max_tiles: int
    max_h_rows: int
    """Sum of the rows of all tiles: rows of h of a low rank at the head."""
    tile_rows: int
    """Rows of a tile, at most: each tile reads a weight once."""

    @property
    def entries_at(self) -> int:
        return HEADER_WORDS + ROW_WORDS * self.max_rows

    @property
    def tiles_at(self) -> int:
        return self.entries_at + ENTRY_WORDS * self.max_entries

    @property
    def num_words(self) -> int:
        return self.tiles_at + TILE_WORDS * self.max_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtrasTables:
    """What the kernels read: tables of resident adapters, and the list of a step."""

    pool: Tensor
    """[pages, elements]"""
    vectors: Tensor
    """int32 [slots, vectors, 2]"""
    matrices: Tensor
    """int32 [slots, matrices, 8]"""
    heap: Tensor
    """int32: page ids and token ids."""
    num_sms: int
    words: Tensor
    """int32 [limits.num_words]"""
    limits: ExtrasLimits

    @property
    def model_matrices(self) -> int:
        """Index of the model's first matrix."""
        return self.matrices.shape[1] - NUM_MODEL_MATRICES


@dataclass(frozen=True, slots=True)
class ReplacedOutputs:
    """A fused linear whose projections adapters may replace."""

    first_matrix: int
    """Index of its first projection's matrix."""
    widths: tuple[int, ...]
    """Outputs of each projection."""
    bias: Tensor | None
    """The bias of the base [outputs]."""


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One adapter of a selection."""

    slot: int
    weight: float
    has_matrices: bool


Entries = tuple[SlotEntry, ...]


def build_extras_list(
    selections: Sequence[Entries], lengths: Sequence[int], limits: ExtrasLimits, out: Ints
) -> int:
    """Write the list of a step to `out` and return its number of words; raise WorkListFull.

    Selection i applies to the next lengths[i] rows; all other rows have none.
    """
    rows = out[HEADER_WORDS : limits.entries_at].reshape(-1, ROW_WORDS)
    entries = out[limits.entries_at : limits.tiles_at].reshape(-1, ENTRY_WORDS)
    tiles = out[limits.tiles_at : limits.num_words].reshape(-1, TILE_WORDS)
    out[:HEADER_WORDS] = 0
    rows.fill(0)
    num_entries = num_tiles = num_h_rows = 0
    for selection, start, stop in _runs(selections, lengths):
        if num_entries + len(selection) > limits.max_entries:
            raise WorkListFull("The step has more adapters with parts beside low rank.")
        rows[start:stop] = num_entries, len(selection)
        for entry in selection:
            entries[num_entries] = entry.slot, _bits(entry.weight)
            num_entries += 1
        wide = [entry for entry in selection if entry.has_matrices]
        for first in range(start, stop if wide else start, limits.tile_rows):
            count = min(limits.tile_rows, stop - first)
            if num_tiles + len(wide) > limits.max_tiles:
                raise WorkListFull("The step has more rows with weights of their own.")
            for number, entry in enumerate(wide):
                chain = 0 if number else len(wide)
                weight = _bits(entry.weight)
                tiles[num_tiles] = entry.slot, first, count, weight, num_h_rows, chain, 0, 0
                num_tiles += 1
                num_h_rows += count
    if num_h_rows > limits.max_h_rows:
        raise WorkListFull("The step has more rows with weights of their own.")
    out[0] = num_tiles
    return limits.tiles_at + TILE_WORDS * num_tiles


def _runs(
    selections: Sequence[Entries], lengths: Sequence[int]
) -> Iterator[tuple[Entries, int, int]]:
    """Yield the (selection, start, stop) of adjacent rows; those without adapters are left out."""
    start = stop = 0
    for number, (selection, length) in enumerate(zip(selections, lengths, strict=True)):
        stop += length
        if number + 1 < len(selections) and selections[number + 1] == selection:
            continue
        if selection:
            yield selection, start, stop
        start = stop


def _bits(weight: float) -> int:
    return int(np.float32(weight).view(np.int32))
