"""Writes the parts of an adapter to its buffer, and finds the largest value of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.adapters.packed.compiled import compiled_packer
from loramux.adapters.packed.dense import DenseLayout, SitePlace, SlicePlace
from loramux.adapters.packed.extras import ExtrasLayout
from loramux.adapters.packed.fp12 import LARGEST_EXPONENT, TOO_LARGE, pack_rows, row_exponents
from loramux.adapters.packed.paged import (
    WORDS_PER_COLUMN,
    ModuleKey,
    RankBlock,
    RankBlockLayout,
    fp12_elements,
)
from loramux.adapters.values import (
    Bits,
    Float32,
    Float64,
    RankMaxima,
    bits_of,
    converted_bits,
    float32_of,
    largest_of,
    magnitudes,
    maxima_of,
    row_maxima,
    stored_bits,
    transposed_bits,
)
from loramux.errors import AdapterRefused
from loramux.types.model import LinearSpec
from loramux.types.packing import Fp12PackOps

if TYPE_CHECKING:
    from loramux.adapters.peft.parts import ExtraTensor, LoraModule


class ModuleWriter(Protocol):
    """Writes the low rank of one adapter to its buffer, in any order and on any threads."""

    def __call__(self, module: LoraModule) -> RankMaxima: ...


class DenseWriter:
    """Packs A as [in, sum of ranks] and B as [rank, out] of every site."""

    def __init__(
        self, layout: DenseLayout, sites: Sequence[LinearSpec], buffer: torch.Tensor
    ) -> None:
        """Zeroes the parts of the buffer that hold no weights."""
        self._out = bits_of(buffer)
        self._dtype = buffer.dtype
        _clear(self._out, layout.gaps)
        self._places: dict[ModuleKey, tuple[SitePlace, SlicePlace]] = {}
        projections = {site.name: site.projections for site in sites}
        for layer, site_name, ranks in layout.key:
            place = layout.places[layer, site_name]
            present = [p for p, rank in zip(projections[site_name], ranks, strict=True) if rank]
            for projection, piece in zip(present, place.slices, strict=True):
                self._places[layer, projection] = place, piece

    def __call__(self, module: LoraModule) -> RankMaxima:
        place, piece = self._places[module.target.layer, module.target.projection]
        a, b = bits_of(module.a), transposed_bits(module.b)
        maxima = RankMaxima(row_maxima(a, module.a.dtype), row_maxima(b, module.b.dtype))
        columns = self._view(place.a_offset, place.in_features, place.total_rank)
        ranks = slice(piece.rank_start, piece.rank_start + piece.rank)
        columns[:, ranks] = converted_bits(a, module.a.dtype, self._dtype).T
        scaled = _scaled(float32_of(b, module.b.dtype), module.scale)
        self._view(piece.offset, piece.rank, piece.out_features)[:] = stored_bits(
            scaled, self._dtype
        )
        return maxima

    def _view(self, offset: int, height: int, width: int) -> Bits:
        return self._out[offset : offset + height * width].reshape(height, width)


class RankBlockWriter:
    """Packs rank blocks, with the scale multiplied into B."""

    def __init__(self, layout: RankBlockLayout, buffer: torch.Tensor) -> None:
        """Zeroes the parts of the buffer that hold no weights."""
        self._layout = layout
        self._out = bits_of(buffer)
        self._dtype = buffer.dtype
        _clear(self._out, layout.gaps)

    def __call__(self, module: LoraModule) -> RankMaxima:
        packer = compiled_packer()
        dtypes = {module.a.dtype, module.b.dtype, self._dtype}
        if packer is not None and self._layout.is_fp12 and dtypes == {torch.bfloat16}:
            return self._write_compiled(module, packer)
        a, b = bits_of(module.a), transposed_bits(module.b)
        scale: float | Float32 = module.scale
        b_maxima = row_maxima(b, module.b.dtype)
        if self._layout.is_fp12:
            maxima, exponents = self._write_fp12(module, a)
            scale = np.ldexp(np.float32(scale), exponents)[:, None]
        else:
            maxima = row_maxima(a, module.a.dtype)
            served = converted_bits(a, module.a.dtype, self._dtype)
            for ranks, block in self._blocks(module):
                self._view(block.a_offset, served[ranks])[:] = served[ranks]
        served = stored_bits(_scaled(float32_of(b, module.b.dtype), scale), self._dtype)
        for ranks, block in self._blocks(module):
            self._view(block.b_offset, served[ranks])[:] = served[ranks]
        return RankMaxima(maxima, b_maxima)

    def _write_compiled(self, module: LoraModule, packer: Fp12PackOps) -> RankMaxima:
        """Write the same bytes as the other methods, in one pass over A and one over B."""
        a, b = bits_of(module.a), bits_of(module.b)
        largest_a, largest_b = (np.empty(len(a), dtype=np.uint16) for _ in range(2))
        exponents = np.empty(len(a), dtype=np.int64)
        for ranks, block in self._blocks(module):
            words = self._fp12_words(block, a.shape[1])
            packer.pack_a(a[ranks], words, largest_a[ranks], exponents[ranks])
            out = self._out[block.b_offset : block.b_offset + block.num_ranks * len(b)]
            packer.pack_b(
                *(b[:, ranks], module.scale, exponents[ranks]),
                *(out.reshape(block.num_ranks, len(b)), largest_b[ranks]),
            )
        return RankMaxima(
            maxima_of(largest_a, torch.bfloat16), maxima_of(largest_b, torch.bfloat16)
        )

    def _fp12_words(self, block: RankBlock, width: int) -> NDArray[np.uint32]:
        size = fp12_elements(block.num_ranks, width)
        words = self._out[block.a_offset : block.a_offset + size].view(np.uint32)
        return words.reshape(-1, WORDS_PER_COLUMN, width)

    def _write_fp12(self, module: LoraModule, a: Bits) -> tuple[Float64, NDArray[np.int16]]:
        """Write A; return its maxima and the exponents of its rows."""
        served = np.ascontiguousarray(converted_bits(a, module.a.dtype, self._dtype))
        absolute = magnitudes(served)
        largest = absolute.max(axis=1)
        if served is a:
            maxima = maxima_of(largest, module.a.dtype)
        else:
            maxima = row_maxima(a, module.a.dtype)
        # Exponents of the rounded values, since rounding may reach the next power of two.
        exponents = row_exponents(largest)
        width = a.shape[1]
        for ranks, block in self._blocks(module):
            words = self._fp12_words(block, width)
            pack_rows(served[ranks], absolute[ranks], exponents[ranks], words)
        return maxima, exponents

    def _blocks(self, module: LoraModule) -> Iterator[tuple[slice, RankBlock]]:
        for block in self._layout.blocks[module.target.layer, module.target.projection]:
            yield slice(block.rank_start, block.rank_start + block.num_ranks), block

    def _view(self, offset: int, matrix: Bits) -> Bits:
        return self._out[offset : offset + matrix.size].reshape(matrix.shape)


def write_extra(layout: ExtrasLayout, buffer: torch.Tensor, part: ExtraTensor) -> float:
    """Write a extra to its place; return its largest absolute value.

    Raises AdapterRefused for values that are not finite in the file or in the serving dtype.
    """
    place, out = layout.places[part.key], bits_of(buffer)
    if part.values.shape != (place.num_rows, place.width):
        raise ValueError(f"{part.key}: {tuple(part.values.shape)}, planned {place}")
    largest = largest_of(part)
    if largest > largest_delta(buffer.dtype):
        _, module, kind = part.key
        raise _too_large(f"The {kind} of {module}", largest, buffer.dtype)
    values, source = bits_of(part.values.contiguous()), part.values.dtype
    for first, count, offset in place.pieces(layout.page_width):
        served = converted_bits(values[first : first + count], source, buffer.dtype)
        out[offset : offset + count * place.width] = served.reshape(-1)
        if not np.isfinite(row_maxima(served.reshape(1, -1), buffer.dtype)[0]):
            raise _overflow(buffer.dtype)
    return largest


def check_range(
    modules: Sequence[LoraModule],
    maxima: Sequence[RankMaxima],
    dtype: torch.dtype,
    *,
    is_fp12: bool = False,
) -> None:
    """Refuses weights that are finite in the file and not in the serving dtype."""
    if not modules:
        return
    scales = np.concatenate(
        [np.full(len(m.a), module.scale) for module, m in zip(modules, maxima, strict=True)]
    )
    a = torch.from_numpy(np.concatenate([m.a for m in maxima])).to(dtype).double()
    b = (
        torch.from_numpy(np.concatenate([m.b for m in maxima])).float()
        * torch.from_numpy(scales).float()
    )
    fits = torch.isfinite(a)
    if is_fp12:
        fits &= a < TOO_LARGE
        exponents = torch.frexp(a).exponent - 1
        b = torch.ldexp(b, exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) * (a > 0))
    if not (fits & torch.isfinite(b.to(dtype))).all():
        raise _overflow(dtype, is_fp12=is_fp12)
    _check_deltas(modules, maxima, dtype)


def largest_delta(dtype: torch.dtype) -> float:
    """Return the bound on |scale * a * b| of one rank, above which activations overflow.

    An activation of about 1 becomes as large; norms and attention then square it in float32.
    """
    limit = torch.finfo(dtype).max
    return float(limit) if dtype is torch.float16 else math.sqrt(torch.finfo(torch.float32).max)


def _check_deltas(
    modules: Sequence[LoraModule], maxima: Sequence[RankMaxima], dtype: torch.dtype
) -> None:
    limit = largest_delta(dtype)
    for module, found in zip(modules, maxima, strict=True):
        largest = float((found.a * found.b).max(initial=0.0)) * abs(module.scale)
        if largest > limit:
            raise _too_large(f"scale * B @ A of {module.target.path}", largest, dtype)


def _too_large(what: str, largest: float, dtype: torch.dtype) -> AdapterRefused:
    return AdapterRefused(
        "overflow",
        f"{what} has a value of about {largest:.1e}, with which activations overflow {dtype}.",
        fix="The training diverged, or a scale is wrong; give an earlier checkpoint.",
    )


def _overflow(dtype: torch.dtype, *, is_fp12: bool = False) -> AdapterRefused:
    return AdapterRefused(
        "overflow",
        f"Its weights, times their scale, are too large for {dtype}.",
        fix=f"Serve with dtype {'' if is_fp12 else 'bfloat16 or '}float32.",
    )


def _clear(out: Bits, gaps: Iterable[tuple[int, int]]) -> None:
    for start, stop in gaps:
        out[start:stop] = 0


def _scaled(values: Float32, scale: float | Float32) -> Float32:
    # Overflows are found by check_range(), and values that are not finite before it.
    with np.errstate(over="ignore", invalid="ignore"):
        values *= np.float32(scale) if isinstance(scale, float | int) else scale
    return values
