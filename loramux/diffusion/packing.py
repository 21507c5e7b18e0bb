"""Packs an adapter of an image model into one buffer, and finds its matrices in it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.extras import ExtraKey, ExtraKind, ExtraSpec
from loramux.adapters.packed.image import AdapterImage, AdapterLayout, Allocate, mapped_buffer
from loramux.adapters.packed.packing import DensePacking
from loramux.adapters.peft.refusals import RefusalCode
from loramux.diffusion.adapter import ImageAdapter, LowRank
from loramux.diffusion.targets import Target
from loramux.errors import AdapterRefused
from loramux.types.model import FusedLinear

PAGE_BYTES = 64 * 2**10
_NO_LAYER = 0


@dataclass(frozen=True, slots=True)
class _Site:
    component: str
    path: str
    a_shape: tuple[int, ...]
    """The shape of one row of A: [in] of a linear layer, [in, height, width] of a convolution."""


class ImagePacking:
    """A of each module as [rank, in], then its B as [out, rank], without gaps, at true ranks.

    The rows of DoRA follow from a page boundary on, as one column, which has no gaps either.
    """

    def __init__(
        self,
        targets: Mapping[str, Mapping[str, Target]],
        dtype: torch.dtype,
        *,
        page_bytes: int = PAGE_BYTES,
        allocate: Allocate = mapped_buffer,
    ) -> None:
        """`targets`: component -> path -> the modules that adapters may change."""
        self._sites = {
            _name(component, path): _Site(component, path, tuple(module.weight.shape[1:]))
            for component, modules in targets.items()
            for path, module in modules.items()
        }
        linears = tuple(
            FusedLinear(
                name=name,
                in_features=math.prod(site.a_shape),
                projections=(name,),
                out_features=(targets[site.component][site.path].weight.shape[0],),
            )
            for name, site in self._sites.items()
        )
        self.dense = DensePacking(linears, dtype, page_bytes // dtype.itemsize, allocate)

    def pack(self, adapter: ImageAdapter) -> AdapterImage:
        """Raises AdapterRefused for weights that are not finite in the packed type."""
        pairs = {
            _name(component, path): pair
            for component, modules in adapter.components.items()
            for path, pair in modules.items()
        }
        ranks = {(_NO_LAYER, name): pair.rank for name, pair in pairs.items()}
        dora = {name: pair.dora for name, pair in pairs.items() if pair.dora is not None}
        extras = [ExtraSpec(*_dora_key(name), rows.numel(), 1) for name, rows in dora.items()]
        layout = self.dense.plan(ranks, extras)
        buffer = self.dense.allocate(layout.num_elements, self.dense.dtype)
        for start, stop in layout.gaps:
            buffer[start:stop].zero_()
        for name, pair in pairs.items():
            packed = self._matrices(layout, buffer, name)
            packed.a.copy_(pair.a)
            packed.b.copy_(pair.b)
            if pair.dora is not None and packed.dora is not None:
                packed.dora.copy_(pair.dora)
        if not bool(torch.isfinite(buffer).all()):
            raise AdapterRefused(
                RefusalCode.NOT_FINITE,
                f"Weights of the adapter are too large for {self.dense.dtype}.",
                fix="Serve the model in bfloat16 or float32, or train the adapter again.",
            )
        return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)

    def unpack(self, layout: AdapterLayout, buffer: Tensor) -> dict[str, dict[str, LowRank]]:
        """Returns component -> path -> the matrices, which are views of the buffer."""
        assert isinstance(layout, DenseLayout)
        found: dict[str, dict[str, LowRank]] = {}
        for _, name in layout.places:
            site = self._sites[name]
            found.setdefault(site.component, {})[site.path] = self._matrices(layout, buffer, name)
        return found

    def _matrices(self, layout: DenseLayout, buffer: Tensor, name: str) -> LowRank:
        place = layout.places[_NO_LAYER, name]
        (only,) = place.slices
        num_a, num_b = place.in_features * only.rank, only.out_features * only.rank
        a = buffer[place.a_offset : place.a_offset + num_a]
        b = buffer[only.offset : only.offset + num_b]
        shape = (only.rank, *self._sites[name].a_shape)
        rows = layout.extras.places.get(_dora_key(name))
        dora = None
        if rows is not None:
            dora = buffer[rows.offset : rows.offset + rows.num_rows].view(-1, only.out_features)
        return LowRank(a.view(shape), b.view(only.out_features, only.rank), dora)


def _dora_key(name: str) -> ExtraKey:
    return _NO_LAYER, name, ExtraKind.DORA


def _name(component: str, path: str) -> str:
    return f"{component}.{path}"
