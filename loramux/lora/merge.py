"""Merges one selection of adapters into copies of the base's linears; the base is unchanged.

Unmerging is using the base modules again: it is exact, and merged and base forwards may alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loramux.adapters.packed.dense import SitePlace
from loramux.kernels.linear import LinearMethod
from loramux.lora.stacks import SiteKey
from loramux.memory.pool import PageView
from loramux.memory.records import ResidentAdapter
from loramux.types.request import Selection


class AdapterDeltas(Protocol):
    """Weight deltas of resident adapters, independent of the layout of their pages."""

    def is_resident(self, cid: str) -> bool: ...

    def is_low_rank(self, cid: str) -> bool:
        """Whether a resident adapter is low rank alone."""
        ...

    def sites(self, cid: str) -> Iterable[SiteKey]:
        """Sites that a resident adapter changes."""
        ...

    def add(self, total: Tensor, cid: str, site: SiteKey, scale: float) -> None:
        """total += scale * (A @ B).T, where the adapter changes the site: float32 [out, in]"""
        ...


@dataclass(frozen=True, slots=True)
class PageDeltas:
    """Deltas of adapters whose pages hold a dense image."""

    adapters: Mapping[str, ResidentAdapter]
    pages: PageView

    def is_resident(self, cid: str) -> bool:
        return cid in self.adapters

    def is_low_rank(self, cid: str) -> bool:
        return not self.adapters[cid].layout.extras.specs

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
        """Read the site's weights in float32, from the pages that hold them only."""
        last = place.slices[-1]
        start, stop = place.a_offset, last.offset + last.rank * last.out_features
        width, storage = self.pages.width, self.pages.storage
        first, end = start // width, -(-stop // width)
        out = torch.empty((end - first) * width, dtype=storage.dtype, device=storage.device)
        self.pages.read(adapter.page_ids[first:end], out)
        return out[start - first * width : stop - first * width].float()


@dataclass(frozen=True, slots=True)
class MergeSource:
    """The base linears and the adapters' deltas that merges are built from."""

    bases: Mapping[SiteKey, LinearMethod]
    deltas: AdapterDeltas

    def is_resident(self, selection: Selection) -> bool:
        return all(self.deltas.is_resident(cid) for cid, _ in selection)

    def touched(self, selection: Selection) -> list[SiteKey]:
        """Sites that the selection's resident adapters change, in the order of their layers."""
        return sorted({site for cid, _ in selection for site in self.deltas.sites(cid)})

    def num_bytes(self, selection: Selection) -> int | None:
        """Bytes of the merged copies; None: the selection cannot be merged."""
        if not selection or not self.is_resident(selection):
            return None
        if not all(self.deltas.is_low_rank(cid) for cid, _ in selection):
            return None
        total = 0
        for site in self.touched(selection):
            base = self.bases.get(site)
            if base is None:
                return None
            total += base.merged_bytes
        return total

    def merged(self, site: SiteKey, selection: Selection) -> LinearMethod:
        """Return the fused linear with the selection added in float32 and rounded once."""
        base = self.bases[site]
        weight = base.dequantised_rows()
        total = weight.to(torch.float32, copy=True)
        for cid, scale in selection:
            self.deltas.add(total, cid, site, scale)
        return base.with_weight(total.to(weight.dtype))


class MergedWeights:
    """Merged linears of one selection, built incrementally; `sites` is used when complete."""

    def __init__(self, source: MergeSource, selection: Selection) -> None:
        num_bytes = source.num_bytes(selection)
        assert num_bytes is not None, f"{selection} cannot be merged"
        self.selection = selection
        self.num_bytes = num_bytes
        """Bytes of all merged linears when complete."""
        self.sites: dict[SiteKey, LinearMethod] = {}
        self._source = source
        self._touched = source.touched(selection)

    @property
    def is_complete(self) -> bool:
        return len(self.sites) == len(self._touched)

    @torch.inference_mode()
    def advance(self, may_go_on: Callable[[], bool]) -> None:
        """Build one site, then more while `may_go_on` returns True; adapters must be resident."""
        while not self.is_complete:
            site = self._touched[len(self.sites)]
            self.sites[site] = self._source.merged(site, self.selection)
            if not may_go_on():
                return


def _matrix(flat: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return flat[start : start + rows * columns].view(rows, columns)
