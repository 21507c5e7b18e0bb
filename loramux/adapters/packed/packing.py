"""How adapters are packed: one packing for each kind of kernel that reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.extras import ExtraSpec, specs_of
from loramux.adapters.packed.image import AdapterLayout, Allocate, mapped_buffer
from loramux.adapters.packed.paged import ModuleKey, RankBlockLayout, plan_rank_blocks, uses_fp12
from loramux.adapters.packed.writers import (
    DenseWriter,
    ModuleWriter,
    RankBlockWriter,
    check_range,
)
from loramux.adapters.values import RankMaxima
from loramux.types.model import LinearSpec

if TYPE_CHECKING:
    from loramux.adapters.peft.parts import LoraModule


class Packing(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sites(self) -> tuple[LinearSpec, ...]: ...

    @property
    def allocate(self) -> Allocate:
        """Allocates the buffers."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for packings that make the same buffers of the same adapters."""
        ...

    @property
    def page_bytes(self) -> int: ...

    def plan(
        self, ranks: Mapping[ModuleKey, int], extras: Sequence[ExtraSpec] = ()
    ) -> AdapterLayout:
        """Return the layout of an adapter with these ranks by (layer, projection) and parts."""
        ...

    def writer(self, layout: AdapterLayout, buffer: torch.Tensor) -> ModuleWriter:
        """Return a writer of parts to a buffer of the layout's size."""
        ...

    def check(self, modules: Sequence[LoraModule], maxima: Sequence[RankMaxima]) -> None:
        """Refuses weights that are out of range in the packed form."""
        ...

    def layout_of(self, key: Sequence[Any], extras_key: Sequence[Any] = ()) -> AdapterLayout:
        """Rebuilds a layout from its key and that of its extras, which may come from a file."""
        ...


@dataclass(frozen=True, slots=True)
class DensePacking:
    """For kernels that read stacked copies: A as [in, ranks], B as [rank, out], without gaps."""

    sites: tuple[LinearSpec, ...]
    dtype: torch.dtype
    page_bytes: int
    allocate: Allocate = mapped_buffer

    @property
    def fingerprint(self) -> str:
        # Low-rank weights do not depend on the page size; an image with other parts records it.
        return _digest("stacked", self.sites, self.dtype)

    def plan(self, ranks: Mapping[ModuleKey, int], extras: Sequence[ExtraSpec] = ()) -> DenseLayout:
        page_width = self.page_bytes // self.dtype.itemsize
        return plan_dense(self.sites, dict(ranks)).with_extras(extras, page_width)

    def writer(self, layout: AdapterLayout, buffer: torch.Tensor) -> ModuleWriter:
        assert isinstance(layout, DenseLayout)
        return DenseWriter(layout, self.sites, buffer)

    def check(self, modules: Sequence[LoraModule], maxima: Sequence[RankMaxima]) -> None:
        check_range(modules, maxima, self.dtype)

    def layout_of(self, key: Sequence[Any], extras_key: Sequence[Any] = ()) -> DenseLayout:
        projections = {site.name: site.projections for site in self.sites}
        ranks = {
            (layer, projection): rank
            for layer, name, site_ranks in key
            for projection, rank in zip(projections[name], site_ranks, strict=True)
            if rank
        }
        return self.plan(ranks, specs_of(extras_key))


@dataclass(frozen=True, slots=True)
class PagedPacking:
    """For kernels that read pages by address: rank blocks, none across a page boundary."""

    sites: tuple[LinearSpec, ...]
    dtype: torch.dtype
    page_bytes: int
    allocate: Allocate
    """Allocates pinned memory if buffers are copied to a GPU."""

    @property
    def page_width(self) -> int:
        """Elements of a page."""
        return self.page_bytes // self.dtype.itemsize

    @property
    def is_fp12(self) -> bool:
        widths = (site.in_features for site in self.sites)
        return uses_fp12(widths, self.dtype, self.page_width)

    @property
    def fingerprint(self) -> str:
        form = "grouped, A in 12 bits" if self.is_fp12 else "grouped"
        return _digest(form, self.sites, self.dtype, self.page_width)

    def plan(
        self, ranks: Mapping[ModuleKey, int], extras: Sequence[ExtraSpec] = ()
    ) -> RankBlockLayout:
        low_rank = plan_rank_blocks(self.sites, ranks, self.page_width, is_fp12=self.is_fp12)
        return low_rank.with_extras(extras)

    def writer(self, layout: AdapterLayout, buffer: torch.Tensor) -> ModuleWriter:
        assert isinstance(layout, RankBlockLayout)
        return RankBlockWriter(layout, buffer)

    def check(self, modules: Sequence[LoraModule], maxima: Sequence[RankMaxima]) -> None:
        check_range(modules, maxima, self.dtype, is_fp12=self.is_fp12)

    def layout_of(self, key: Sequence[Any], extras_key: Sequence[Any] = ()) -> RankBlockLayout:
        ranks = {(layer, projection): rank for layer, projection, rank in key}
        return self.plan(ranks, specs_of(extras_key))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
