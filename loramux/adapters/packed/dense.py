"""Dense layout of an adapter: its low-rank matrices without gaps, at their true ranks.

Other parts follow them from a page boundary on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loramux.adapters.packed.extras import NO_EXTRAS, ExtrasLayout, ExtraSpec, plan_extras
from loramux.types.model import LinearSpec

# Size of the header of an image file; the buffer follows.
IMAGE_HEADER_BYTES = 65536


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """One projection's B: [rank, out] at `offset`, for columns rank_start.. of x @ A."""

    offset: int
    rank: int
    rank_start: int
    out_start: int
    out_features: int


@dataclass(frozen=True, slots=True)
class SitePlace:
    """A of all slices side by side, [in, sum of ranks] at a_offset; then each slice's B."""

    a_offset: int
    in_features: int
    total_rank: int
    slices: tuple[SlicePlace, ...]


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Offsets in elements; adapters with equal `key` and `extras.key` have the same layout."""

    places: dict[tuple[int, str], SitePlace]
    low_rank_elements: int
    key: tuple[tuple[int, str, tuple[int, ...]], ...]
    """(layer, site, ranks) of the low-rank weights."""
    extras: ExtrasLayout = NO_EXTRAS

    @property
    def num_elements(self) -> int:
        return self.extras.end if self.extras.specs else self.low_rank_elements

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the elements without weights."""
        if not self.extras.specs:
            return ()
        return ((self.low_rank_elements, self.extras.start), *self.extras.gaps)

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 if the adapter has no low-rank weights."""
        return max((rank for _, _, ranks in self.key for rank in ranks), default=0)

    def with_extras(self, specs: Sequence[ExtraSpec], page_width: int) -> DenseLayout:
        """Return the layout of an adapter that also has these parts."""
        extras = plan_extras(specs, num_elements=self.low_rank_elements, page_width=page_width)
        return replace(self, extras=extras)


def plan_dense(sites: tuple[LinearSpec, ...], ranks: dict[tuple[int, str], int]) -> DenseLayout:
    """Plans the buffer; ranks: (layer, projection) -> rank of what the adapter changes."""
    places: dict[tuple[int, str], SitePlace] = {}
    key: list[tuple[int, str, tuple[int, ...]]] = []
    offset = 0
    for layer in sorted({layer for layer, _ in ranks}):
        for site in sites:
            site_ranks = tuple(ranks.get((layer, name), 0) for name in site.projections)
            if not any(site_ranks):
                continue
            place = _place_site(site, site_ranks, offset)
            places[layer, site.name] = place
            key.append((layer, site.name, site_ranks))
            offset += sum(site_ranks) * site.in_features
            offset += sum(r * out for r, out in zip(site_ranks, site.out_features, strict=True))
    return DenseLayout(places=places, low_rank_elements=offset, key=tuple(key))


def _place_site(site: LinearSpec, ranks: tuple[int, ...], offset: int) -> SitePlace:
    slices = []
    b_offset = offset + sum(ranks) * site.in_features
    rank_start = out_start = 0
    for rank, out_features in zip(ranks, site.out_features, strict=True):
        if rank:
            slices.append(SlicePlace(b_offset, rank, rank_start, out_start, out_features))
        b_offset += rank * out_features
        rank_start += rank
        out_start += out_features
    return SitePlace(offset, site.in_features, sum(ranks), tuple(slices))
