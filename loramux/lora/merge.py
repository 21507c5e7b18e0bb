"""Copies of the base's linears with one selection of adapters merged in; the base is kept as it is.

Taking a merge back is using the old modules again, so it is exact, and merged and plain forwards
may take turns as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loramux.adapters.packed.dense import SitePlace
from loramux.kernels.linear import LinearMethod, dense_of
from loramux.lora.stacks import SiteKey
from loramux.memory.pool import PagePool
from loramux.memory.records import ResidentAdapter
from loramux.types.request import Selection


class AdapterDeltas(Protocol):
    """What resident adapters add to the base's weights, however their pages are laid out."""

    def is_resident(self, cid: str) -> bool: ...

    def sites(self, cid: str) -> Iterable[SiteKey]:
        """Those that a resident adapter changes."""
        ...

    def add(self, total: Tensor, cid: str, site: SiteKey, scale: float) -> None:
        """total += scale * (A @ B).T, where the adapter changes the site: float32 [out, in]"""
        ...


@dataclass(frozen=True, slots=True)
class PageDeltas:
    """Of adapters whose pages hold their images from beginning to end."""

    adapters: Mapping[str, ResidentAdapter]
    pool: PagePool

    def is_resident(self, cid: str) -> bool:
        return cid in self.adapters

    def sites(self, cid: str) -> Iterable[SiteKey]:
        return self.adapters[cid].stacked.places

    def add(self, total: Tensor, cid: str, site: SiteKey, scale: float) -> None:
        adapter = self.adapters[cid]
        place = adapter.stacked.places.get(site)
        if place is None:
            return
        flat = self._read(adapter, place)
        a = _matrix(flat, 0, place.in_features, place.total_rank)
        for piece in place.slices:
            b = _matrix(flat, piece.offset - place.a_offset, piece.rank, piece.out_features)
            own_a = a[:, piece.rank_start : piece.rank_start + piece.rank]
            rows = total[piece.out_start : piece.out_start + piece.out_features]
            rows.addmm_(b.t(), own_a.t(), alpha=scale)

    def _read(self, adapter: ResidentAdapter, place: SitePlace) -> Tensor:
        """The site's part of the adapter, in float32, from the pages that hold it and no others."""
        last = place.slices[-1]
        start, stop = place.a_offset, last.offset + last.rank * last.out_features
        width, storage = self.pool.geometry.page_elements, self.pool.storage
        first, end = start // width, -(-stop // width)
        out = torch.empty((end - first) * width, dtype=storage.dtype, device=storage.device)
        self.pool.read(adapter.page_ids[first:end], out)
        return out[start - first * width : stop - first * width].float()


@dataclass(frozen=True, slots=True)
class MergeSource:
    bases: Mapping[SiteKey, LinearMethod]
    deltas: AdapterDeltas

    def is_resident(self, selection: Selection) -> bool:
        return all(self.deltas.is_resident(cid) for cid, _ in selection)

    def touched(self, selection: Selection) -> list[SiteKey]:
        """Sites that the selection's resident adapters change, in the order of their layers."""
        return sorted({site for cid, _ in selection for site in self.deltas.sites(cid)})

    def num_bytes(self, selection: Selection) -> int | None:
        """What the merged copies would take; None: it cannot be merged."""
        if not selection or not self.is_resident(selection):
            return None
        total = 0
        for site in self.touched(selection):
            base = self.bases.get(site)
            if base is None or base.dense is None:
                return None
            total += base.num_bytes
        return total

    def merged(self, site: SiteKey, selection: Selection) -> LinearMethod:
        """The fused linear with the selection added in float32 and rounded once."""
        base = self.bases[site]
        weight, _ = dense_of(base)
        total = weight.to(torch.float32, copy=True)
        for cid, scale in selection:
            self.deltas.add(total, cid, site, scale)
        return base.with_weight(total.to(weight.dtype))


class MergedWeights:
    """One selection's merged linears, made a few at a time; use `sites` when it is complete."""

    def __init__(self, source: MergeSource, selection: Selection) -> None:
        num_bytes = source.num_bytes(selection)
        assert num_bytes is not None, f"{selection} cannot be merged"
        self.selection = selection
        self.num_bytes = num_bytes
        """What all of it takes when it is complete."""
        self.sites: dict[SiteKey, LinearMethod] = {}
        self._source = source
        self._touched = source.touched(selection)

    @property
    def is_complete(self) -> bool:
        return len(self.sites) == len(self._touched)

    @torch.inference_mode()
    def advance(self, may_go_on: Callable[[], bool]) -> None:
        """Makes one site, then more while `may_go_on` says so; all adapters must be resident."""
        while not self.is_complete:
            site = self._touched[len(self.sites)]
            self.sites[site] = self._source.merged(site, self.selection)
            if not may_go_on():
                return


def _matrix(flat: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return flat[start : start + rows * columns].view(rows, columns)
