"""Packs an adapter of an image model into one buffer, and finds its matrices in it again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.extras import ExtraKind, ExtraSpec
from loramux.adapters.packed.image import AdapterImage, AdapterLayout, Allocate, mapped_buffer
from loramux.adapters.packed.packing import DensePacking
from loramux.adapters.peft.refusals import RefusalCode
from loramux.diffusion.adapter import ImageAdapter, Kronecker, LowRank, ModuleDelta
from loramux.diffusion.targets import Target
from loramux.errors import AdapterRefused
from loramux.types.model import LinearSpec

PAGE_BYTES = 64 * 2**10
_NO_LAYER = 0


@dataclass(frozen=True, slots=True)
class _Site:
    component: str
    path: str
    out_features: int
    a_shape: tuple[int, ...]
    """The shape of one row of A: [in] of a linear layer, [in, height, width] of a convolution."""


class ImagePacking:
    """A of each module as [rank, in], then its B as [out, rank], without gaps, at true ranks.

    Rows of DoRA, biases and Kronecker factors follow from a page boundary on, each as one column,
    which has no gaps either.
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
            _name(component, path): _Site(
                component, path, len(module.weight), tuple(module.weight.shape[1:])
            )
            for component, modules in targets.items()
            for path, module in modules.items()
        }
        linears = tuple(
            LinearSpec(
                name=name,
                in_features=math.prod(site.a_shape),
                projections=(name,),
                out_features=(site.out_features,),
            )
            for name, site in self._sites.items()
        )
        self.dense = DensePacking(linears, dtype, page_bytes, allocate)

    def pack(self, adapter: ImageAdapter) -> AdapterImage:
        """Raise AdapterRefused for weights that are not finite in the packed type."""
        pairs = {
            _name(component, path): pair
            for component, modules in adapter.components.items()
            for path, pair in modules.items()
        }
        ranks = {
            (_NO_LAYER, name): pair.rank
            for name, pair in pairs.items()
            if isinstance(pair, LowRank) and pair.rank
        }
        extras = [spec for name, pair in pairs.items() for spec in _extras(name, pair)]
        layout = self.dense.plan(ranks, extras)
        buffer = self.dense.allocate(layout.num_elements, self.dense.dtype)
        for start, stop in layout.gaps:
            buffer[start:stop].zero_()
        for name, pair in pairs.items():
            packed = self._matrices(layout, buffer, name)
            for place, values in zip(_tensors(packed), _tensors(pair), strict=True):
                place.copy_(values)
        if not bool(torch.isfinite(buffer).all()):
            raise AdapterRefused(
                RefusalCode.NOT_FINITE,
                f"Weights of the adapter are too large for {self.dense.dtype}.",
                fix="Serve the model in bfloat16 or float32, or train the adapter again.",
            )
        return AdapterImage(cid=adapter.cid, layout=layout, buffer=buffer)

    def unpack(self, layout: AdapterLayout, buffer: Tensor) -> dict[str, dict[str, ModuleDelta]]:
        """Return component -> path -> the matrices, which are views of the buffer."""
        assert isinstance(layout, DenseLayout)
        found: dict[str, dict[str, ModuleDelta]] = {}
        names = [name for _, name in layout.places] + [key[1] for key in layout.extras.places]
        for name in dict.fromkeys(names):
            site = self._sites[name]
            found.setdefault(site.component, {})[site.path] = self._matrices(layout, buffer, name)
        return found

    def _matrices(self, layout: DenseLayout, buffer: Tensor, name: str) -> ModuleDelta:
        site = self._sites[name]
        bias = _column(layout, buffer, name, ExtraKind.BIAS)
        factors = _column(layout, buffer, name, ExtraKind.KRONECKER)
        if factors is not None:
            place = layout.extras.places[_NO_LAYER, name, ExtraKind.KRONECKER]
            rows, columns, height, skip = place.shape
            left, right = factors[: rows * columns], factors[rows * columns :]
            kernel = site.a_shape[1:]
            right = right.view(height, site.a_shape[0] // columns, *kernel)
            return Kronecker(left.view(rows, columns), right, site.out_features, skip, bias)
        dora = _column(layout, buffer, name, ExtraKind.DORA)
        if dora is not None:
            dora = dora.view(-1, site.out_features)
        if (_NO_LAYER, name) not in layout.places:
            a, b = buffer.new_empty(0, *site.a_shape), buffer.new_empty(site.out_features, 0)
            return LowRank(a, b, dora, bias)
        (only,) = layout.places[_NO_LAYER, name].slices
        start, shape = layout.places[_NO_LAYER, name].a_offset, (only.rank, *site.a_shape)
        a = buffer[start : start + math.prod(shape)].view(shape)
        b = buffer[only.offset : only.offset + site.out_features * only.rank]
        return LowRank(a, b.view(site.out_features, only.rank), dora, bias)


def _column(layout: DenseLayout, buffer: Tensor, name: str, kind: ExtraKind) -> Tensor | None:
    place = layout.extras.places.get((_NO_LAYER, name, kind))
    return None if place is None else buffer[place.offset : place.offset + place.num_rows]


def _extras(name: str, delta: ModuleDelta) -> Iterator[ExtraSpec]:
    """Yield the extras, each as one column, which has no gaps."""
    if isinstance(delta, Kronecker):
        size = delta.left.numel() + delta.right.numel()
        shape = (*delta.left.shape, len(delta.right), delta.skip)
        yield ExtraSpec(_NO_LAYER, name, ExtraKind.KRONECKER, size, 1, shape=shape)
    if delta.dora is not None:
        yield ExtraSpec(_NO_LAYER, name, ExtraKind.DORA, delta.dora.numel(), 1)
    if delta.bias is not None:
        yield ExtraSpec(_NO_LAYER, name, ExtraKind.BIAS, delta.bias.numel(), 1)


def _tensors(delta: ModuleDelta) -> list[Tensor]:
    pair = (delta.a, delta.b) if isinstance(delta, LowRank) else (delta.left, delta.right)
    return [part for part in (*pair, delta.dora, delta.bias) if part is not None]


def _name(component: str, path: str) -> str:
    return f"{component}.{path}"
