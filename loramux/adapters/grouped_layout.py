"""An adapter's weights over pages as a GPU reads them: groups of rank rows, none across a page.

A group is up to GROUP_RANKS ranks of one projection: A as [ranks, in] and B as [ranks, out], each
one contiguous block inside a page. Pages are filled from their start; only their ends stay empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from loramux.errors import AdapterRefused, DoesNotFit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loramux.adapters.layout import Site
    from loramux.adapters.reader import CheckedAdapter, LoraModule

GROUP_RANKS = 16
# Blocks begin at multiples of this many elements, the unit of the addresses in a group table.
ALIGN_ELEMENTS = 64

Place = tuple[int, str]
"""(layer, projection)"""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks rank_start.. of one projection. Offsets are in elements of the adapter's buffer."""

    rank_start: int
    num_ranks: int
    a_offset: int
    b_offset: int


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    groups: Mapping[Place, tuple[Group, ...]]
    page_elements: int
    num_pages: int
    num_weights: int
    """Elements that hold weights; the rest of num_elements is padding."""
    key: tuple[tuple[int, str, int], ...]
    """(layer, projection, rank): adapters of one key have one layout."""

    @property
    def num_elements(self) -> int:
        return self.num_pages * self.page_elements

    @property
    def max_rank(self) -> int:
        return max(rank for _, _, rank in self.key)


@dataclass(frozen=True, slots=True)
class GroupTable:
    """A layout as arrays, the groups of all projections in a row, the same in every layer."""

    offsets: NDArray[np.int64]
    """[layers, groups, 2] of A and B in the adapter's buffer."""
    num_ranks: NDArray[np.int32]
    """[layers, groups]; 0: the adapter leaves this layer alone there."""
    groups_per_projection: NDArray[np.int32]
    """[projections], the most that any layer has."""
    page_elements: int

    def addresses(self, page_ids: Sequence[int]) -> NDArray[np.int32]:
        """[layers, groups, 4]: A and B in units of ALIGN_ELEMENTS of the pool, ranks, 0."""
        pages = np.asarray(page_ids, dtype=np.int64)
        page, rest = np.divmod(self.offsets, self.page_elements)
        entries = np.zeros((*self.num_ranks.shape, 4), dtype=np.int32)
        entries[..., :2] = (pages[page] * self.page_elements + rest) // ALIGN_ELEMENTS
        entries[..., 2] = self.num_ranks
        entries[self.num_ranks == 0] = 0
        return entries


class _Pages:
    """First fit: a block goes into the first page that has room for it."""

    def __init__(self, page_elements: int) -> None:
        self.page_elements = page_elements
        self.num_pages = 0
        # Page number and first free element of pages that may still take a block.
        self._open: list[list[int]] = []

    def place(self, num_elements: int) -> int:
        needed = _align(num_elements)
        for entry in self._open:
            if entry[1] + needed <= self.page_elements:
                break
        else:
            entry = [self.num_pages, 0]
            self._open.append(entry)
            self.num_pages += 1
        page, start = entry
        entry[1] += needed
        if entry[1] + ALIGN_ELEMENTS > self.page_elements:
            self._open.remove(entry)
        return page * self.page_elements + start


def plan_groups(
    sites: Sequence[Site], ranks: Mapping[Place, int], page_elements: int
) -> GroupedLayout:
    """`ranks`: what the adapter changes. Layers come in order, so that a copy can follow them."""
    if page_elements % ALIGN_ELEMENTS:
        raise ValueError(f"a page of {page_elements} elements is no multiple of {ALIGN_ELEMENTS}")
    shapes = _shapes(sites)
    pages = _Pages(page_elements)
    groups: dict[Place, tuple[Group, ...]] = {}
    num_weights = 0
    for layer in sorted({layer for layer, _ in ranks}):
        wanted = {name: ranks[layer, name] for name in shapes if ranks.get((layer, name), 0)}
        placed = _place_layer(wanted, shapes, pages)
        groups.update({(layer, name): found for name, found in placed.items()})
        num_weights += sum(rank * sum(shapes[name]) for name, rank in wanted.items())
    return GroupedLayout(
        groups=groups,
        page_elements=page_elements,
        num_pages=pages.num_pages,
        num_weights=num_weights,
        key=tuple((layer, name, ranks[layer, name]) for layer, name in groups),
    )


def tabulate(layout: GroupedLayout, *, projections: Sequence[str], num_layers: int) -> GroupTable:
    """`projections` of all sites, in the order in which the sites' slices come."""
    per_projection = [
        max((len(groups) for (_, p), groups in layout.groups.items() if p == name), default=0)
        for name in projections
    ]
    first = dict(zip(projections, np.cumsum([0, *per_projection]), strict=False))
    offsets = np.zeros((num_layers, sum(per_projection), 2), dtype=np.int64)
    num_ranks = np.zeros((num_layers, sum(per_projection)), dtype=np.int32)
    for (layer, name), groups in layout.groups.items():
        for index, group in enumerate(groups, start=first[name]):
            offsets[layer, index] = group.a_offset, group.b_offset
            num_ranks[layer, index] = group.num_ranks
    return GroupTable(
        offsets=offsets,
        num_ranks=num_ranks,
        groups_per_projection=np.array(per_projection, dtype=np.int32),
        page_elements=layout.page_elements,
    )


def pack_groups(adapter: CheckedAdapter, layout: GroupedLayout, out: torch.Tensor) -> None:
    """out [num_elements], pinned or not: the adapter's pages, the scale folded into B."""
    out.zero_()
    for module in adapter.modules:
        for group in layout.groups[module.target.layer, module.target.projection]:
            _pack_group(module, group, out)
    # Checked once, in the dtype that is served: a value that was finite may overflow in float16.
    if not torch.isfinite(out.sum()) and not torch.isfinite(out).all():
        raise AdapterRefused(
            "overflow",
            f"Its weights, times their scale, are too large for {out.dtype}.",
            fix="Serve with dtype bfloat16 or float32.",
        )


def _pack_group(module: LoraModule, group: Group, out: torch.Tensor) -> None:
    ranks = slice(group.rank_start, group.rank_start + group.num_ranks)
    a = module.a[ranks]
    b = module.b[:, ranks].t().float() * module.scale
    for offset, matrix in ((group.a_offset, a), (group.b_offset, b)):
        out[offset : offset + matrix.numel()].view(matrix.shape).copy_(matrix)


def _place_layer(
    ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, int]], pages: _Pages
) -> dict[str, tuple[Group, ...]]:
    """The largest blocks first, so that the small ones fill the ends of pages."""
    blocks: list[tuple[int, str, int, int]] = []
    cuts = {name: _cut(ranks[name], shapes[name], pages.page_elements) for name in ranks}
    for name, pieces in cuts.items():
        for index, (_, num_ranks) in enumerate(pieces):
            blocks += [(num_ranks * shapes[name][side], name, index, side) for side in (0, 1)]
    blocks.sort(key=lambda block: -block[0])
    offsets = {block[1:]: pages.place(block[0]) for block in blocks}
    return {
        name: tuple(
            Group(start, num_ranks, offsets[name, index, 0], offsets[name, index, 1])
            for index, (start, num_ranks) in enumerate(pieces)
        )
        for name, pieces in cuts.items()
    }


def _cut(rank: int, shape: tuple[int, int], page_elements: int) -> list[tuple[int, int]]:
    """(first rank, number of ranks) of each group; A and B are cut alike."""
    per_group = min(GROUP_RANKS, page_elements // max(shape))
    if per_group == 0:
        raise DoesNotFit(
            f"One rank of an adapter has rows of {max(shape)} elements, and a page has "
            f"{page_elements}. Serve with a larger block size."
        )
    return [(start, min(per_group, rank - start)) for start in range(0, rank, per_group)]


def _shapes(sites: Sequence[Site]) -> dict[str, tuple[int, int]]:
    return {
        name: (site.in_features, out_features)
        for site in sites
        for name, out_features in zip(site.projections, site.out_features, strict=True)
    }


def _align(num_elements: int) -> int:
    return -(-num_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
