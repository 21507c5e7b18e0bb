"""Paged layout of an adapter for GPUs: rank blocks, none across a page boundary.

A rank block is up to RANK_BLOCK ranks of one projection: A as [ranks, in] and B as [ranks, out],
each contiguous inside a page. Pages are filled from their start; only their ends stay empty. A may
be packed to fp12; the scale of its rows is then in B. Other parts follow on pages of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from loramux.adapters.packed.extras import (
    ALIGN_ELEMENTS,
    NO_EXTRAS,
    ExtrasLayout,
    ExtraSpec,
    plan_extras,
)
from loramux.errors import DoesNotFit

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from loramux.types.model import LinearSpec, PackingKind

RANK_BLOCK = 16
# Most adapters on the device at once, and their average number of rank blocks in a layer.
MAX_DEVICE_ADAPTERS = 8192
BLOCKS_PER_ADAPTER = 16
# The unit of fp12: octets of eight rows, blocks of 128 columns, three words (of two bfloat16
# elements) for each column of an octet.
OCTET = 8
BLOCK_COLUMNS = 128
WORDS_PER_COLUMN = 3
# Pages are read as elements of up to this size.
_WORD_BYTES = 4

ModuleKey = tuple[int, str]
"""(layer, projection)"""


@dataclass(frozen=True, slots=True)
class RankBlock:
    """Ranks rank_start.. of one projection; offsets in elements of the adapter's buffer."""

    rank_start: int
    num_ranks: int
    a_offset: int
    b_offset: int


@dataclass(frozen=True, slots=True)
class RankBlockLayout:
    blocks: Mapping[ModuleKey, tuple[RankBlock, ...]]
    page_width: int
    """Elements of a page in the dtype of the image."""
    num_pages: int
    num_weights: int
    """Elements that hold weights; the rest of num_elements is padding."""
    is_fp12: bool
    """Whether A is packed to fp12."""
    key: tuple[tuple[int, str, int], ...]
    """(layer, projection, rank); adapters with equal `key` and `extras.key` have equal layouts."""
    gaps: tuple[tuple[int, int], ...]
    """(start, stop) of the elements without weights."""
    extras: ExtrasLayout = NO_EXTRAS

    @property
    def num_elements(self) -> int:
        return self.num_pages * self.page_width

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 if the adapter has no low-rank weights."""
        return max((rank for _, _, rank in self.key), default=0)

    def with_extras(self, specs: Sequence[ExtraSpec]) -> RankBlockLayout:
        """Return the layout of an adapter that also has these parts."""
        extras = plan_extras(specs, num_elements=self.num_elements, page_width=self.page_width)
        return replace(
            self,
            num_pages=self.num_pages + extras.num_pages,
            num_weights=self.num_weights + extras.num_weights,
            gaps=(*self.gaps, *extras.gaps),
            extras=extras,
        )


@dataclass(frozen=True, slots=True)
class RankBlockTable:
    """A layout as arrays: in every layer the rank blocks of all projections in order."""

    offsets: NDArray[np.int64]
    """[layers, blocks, 2]: offsets of A and B in the adapter's buffer."""
    num_ranks: NDArray[np.int32]
    """[layers, blocks]; 0: the adapter does not change this layer there."""
    blocks_per_projection: NDArray[np.int32]
    """[projections]: the maximum over the layers."""
    page_width: int

    def addresses(self, page_ids: Sequence[int]) -> NDArray[np.int32]:
        """[layers, blocks, 4]: A and B in units of ALIGN_ELEMENTS of the pool, ranks, 0."""
        pages = np.asarray(page_ids, dtype=np.int64)
        page, rest = np.divmod(self.offsets, self.page_width)
        entries = np.zeros((*self.num_ranks.shape, 4), dtype=np.int32)
        entries[..., :2] = (pages[page] * self.page_width + rest) // ALIGN_ELEMENTS
        entries[..., 2] = self.num_ranks
        entries[self.num_ranks == 0] = 0
        return entries


class _Pages:
    """First-fit allocator: a matrix goes into the first page that has room for it."""

    def __init__(self, page_width: int) -> None:
        self.page_width = page_width
        self.num_pages = 0
        # Page number and first free element of pages with room for a matrix.
        self._open: list[list[int]] = []
        # (start, stop) of each matrix.
        self._placed: list[tuple[int, int]] = []

    def place(self, num_elements: int) -> int:
        needed = _align(num_elements)
        for entry in self._open:
            if entry[1] + needed <= self.page_width:
                break
        else:
            entry = [self.num_pages, 0]
            self._open.append(entry)
            self.num_pages += 1
        page, start = entry
        entry[1] += needed
        if entry[1] + ALIGN_ELEMENTS > self.page_width:
            self._open.remove(entry)
        offset = page * self.page_width + start
        self._placed.append((offset, offset + num_elements))
        return offset

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Return the (start, stop) of the elements between and after the matrices."""
        end = self.num_pages * self.page_width
        bounds = [(0, 0), *sorted(self._placed), (end, end)]
        return ((stop, start) for (_, stop), (start, _) in pairwise(bounds) if stop < start)


def page_bytes_of(kv_bytes: int, element_bytes: int, packing: PackingKind) -> int:
    """Return the bytes of a page for KV cache of kv_bytes, and for adapters of such elements.

    A page is a whole number of the units in which kernels address adapters.
    """
    unit = _WORD_BYTES if packing == "dense" else ALIGN_ELEMENTS * element_bytes
    return -(-kv_bytes // unit) * unit


def uses_fp12(in_features: Iterable[int], dtype: torch.dtype | str, page_width: int) -> bool:
    """Return whether the A of adapters on such a base is stored as fp12.

    `dtype` may be a name such as "bfloat16", so that plans need no torch.
    """
    widths = list(in_features)
    return (
        str(dtype).removeprefix("torch.") == "bfloat16"
        and all(width % BLOCK_COLUMNS == 0 for width in widths)
        and fp12_elements(RANK_BLOCK, max(widths, default=0)) <= page_width
    )


def fp12_elements(num_rows: int, width: int) -> int:
    """Return the number of bfloat16 elements that rows take in fp12; octets are whole."""
    return -(-num_rows // OCTET) * WORDS_PER_COLUMN * 2 * width


def plan_rank_blocks(
    sites: Sequence[LinearSpec],
    ranks: Mapping[ModuleKey, int],
    page_width: int,
    *,
    is_fp12: bool = False,
) -> RankBlockLayout:
    """Plans the pages, in the order of layers; ranks: of each module that the adapter changes."""
    if page_width % ALIGN_ELEMENTS:
        raise ValueError(f"{page_width} elements of a page, not a multiple of {ALIGN_ELEMENTS}")
    shapes = _shapes(sites)
    pages = _Pages(page_width)
    placed: dict[ModuleKey, tuple[RankBlock, ...]] = {}
    num_weights = 0
    for layer in sorted({layer for layer, _ in ranks}):
        wanted = {name: ranks[layer, name] for name in shapes if ranks.get((layer, name), 0)}
        blocks = _blocks(wanted, shapes, page_width, is_fp12=is_fp12)
        layer_blocks = _place_layer(blocks, pages)
        placed.update({(layer, name): found for name, found in layer_blocks.items()})
        num_weights += sum(a_size + b_size for _, _, a_size, b_size in chain(*blocks.values()))
    return RankBlockLayout(
        blocks=placed,
        page_width=page_width,
        num_pages=pages.num_pages,
        num_weights=num_weights,
        is_fp12=is_fp12,
        key=tuple((layer, name, ranks[layer, name]) for layer, name in placed),
        gaps=tuple(pages.gaps()),
    )


def tabulate(
    layout: RankBlockLayout, *, projections: Sequence[str], num_layers: int
) -> RankBlockTable:
    """Convert a layout to arrays; projections of all sites, in the order of their slices."""
    per_projection = [
        max((len(blocks) for (_, p), blocks in layout.blocks.items() if p == name), default=0)
        for name in projections
    ]
    first = dict(zip(projections, np.cumsum([0, *per_projection]), strict=False))
    offsets = np.zeros((num_layers, sum(per_projection), 2), dtype=np.int64)
    num_ranks = np.zeros((num_layers, sum(per_projection)), dtype=np.int32)
    for (layer, name), blocks in layout.blocks.items():
        for index, block in enumerate(blocks, start=first[name]):
            offsets[layer, index] = block.a_offset, block.b_offset
            num_ranks[layer, index] = block.num_ranks
    return RankBlockTable(
        offsets=offsets,
        num_ranks=num_ranks,
        blocks_per_projection=np.array(per_projection, dtype=np.int32),
        page_width=layout.page_width,
    )


Piece = tuple[int, int, int, int]
"""(first rank, number of ranks, elements of A, elements of B) of a rank block."""


def _blocks(
    ranks: Mapping[str, int],
    shapes: Mapping[str, tuple[int, int]],
    page_width: int,
    *,
    is_fp12: bool,
) -> dict[str, list[Piece]]:
    """Return the rank blocks of a layer and their sizes."""
    blocks: dict[str, list[Piece]] = {}
    for name, rank in ranks.items():
        width_in, width_out = shapes[name]
        blocks[name] = [
            (
                start,
                num_ranks,
                fp12_elements(num_ranks, width_in) if is_fp12 else num_ranks * width_in,
                num_ranks * width_out,
            )
            for start, num_ranks in _cut(rank, shapes[name], page_width)
        ]
    return blocks


def _place_layer(
    pieces: Mapping[str, Sequence[Piece]], pages: _Pages
) -> dict[str, tuple[RankBlock, ...]]:
    """Places the largest matrices first, so that small ones fill the ends of pages."""
    blocks = [
        (piece[2 + side], name, index, side)
        for name, of_name in pieces.items()
        for index, piece in enumerate(of_name)
        for side in (0, 1)
    ]
    blocks.sort(key=lambda block: -block[0])
    offsets = {block[1:]: pages.place(block[0]) for block in blocks}
    return {
        name: tuple(
            RankBlock(start, num_ranks, offsets[name, index, 0], offsets[name, index, 1])
            for index, (start, num_ranks, _, _) in enumerate(of_name)
        )
        for name, of_name in pieces.items()
    }


def _cut(rank: int, shape: tuple[int, int], page_width: int) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each rank block; A and B are split alike."""
    per_block = min(RANK_BLOCK, page_width // max(shape))
    if per_block == 0:
        raise DoesNotFit(
            f"One rank of an adapter has rows of {max(shape)} elements, and a page has "
            f"{page_width}. Serve with a larger block size."
        )
    return [(start, min(per_block, rank - start)) for start in range(0, rank, per_block)]


def _shapes(sites: Sequence[LinearSpec]) -> dict[str, tuple[int, int]]:
    return {
        name: (site.in_features, out_features)
        for site in sites
        for name, out_features in zip(site.projections, site.out_features, strict=True)
    }


def _align(num_elements: int) -> int:
    return -(-num_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
