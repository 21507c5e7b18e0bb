"""Weights of one byte per element: FP8, int8 and LLM.int8()."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.models.quantised.codes import E8M0_DTYPES, grouped, powers_of_two, spread_blocks
from loramux.models.quantised.parts import FLOATS, Parts
from loramux.types.quantisation import Bnb8Format, Fp8Format, Int8Format

FP8 = torch.float8_e4m3fn
# bitsandbytes multiplies by this float32 number, the inverse of 127.
BNB_STEP = 1 / 127


def dequantise_fp8(parts: Parts, weight_format: Fp8Format) -> Tensor:
    codes, scales = fp8_codes(parts, weight_format)
    values = codes.float()
    if scales.shape[1] == 1:
        return values.mul_(scales)
    assert weight_format.block is not None
    return values.mul_(spread_blocks(scales, codes.shape, (1, weight_format.block[1])))


def fp8_codes(parts: Parts, weight_format: Fp8Format) -> tuple[Tensor, Tensor]:
    """Read codes [rows, columns], and scales [rows or 1, 1] or [rows, column blocks] in float32."""
    name = scale_name(parts)
    weight = parts.matrix("weight", (FP8,))
    scale = parts.take(name, (*FLOATS, *E8M0_DTYPES))
    if scale.dtype in E8M0_DTYPES:
        scale = powers_of_two(scale)
    scale = scale.float()
    if scale.ndim == 4:  # ModelOpt writes the grid as [rows, 1, columns, 1].
        scale = scale.squeeze(3).squeeze(1)
    if weight_format.block is None or scale.numel() == 1:
        return weight, per_row(parts, name, scale, len(weight))
    rows, columns = weight_format.block
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    parts.check_shape(name, scale, grid)
    return weight, scale.repeat_interleave(rows, dim=0)[: len(weight)]


def scale_name(parts: Parts) -> str:
    """Return the name of the factor; `weight_scale_inv` is none of an inverse."""
    names = ("weight_scale", "weight_scale_inv")
    found = [name for name in names if name in parts]
    if len(found) == 2:
        raise parts.wrong("weight", f"has the two scales {' and '.join(found)}")
    return found[0] if found else names[0]


def dequantise_int8(parts: Parts, weight_format: Int8Format) -> Tensor:
    weight = parts.matrix("weight", (torch.int8,))
    scale = parts.take("weight_scale")
    zero = 0.0 if weight_format.symmetric else read_zeros(parts, scale)
    if weight_format.group_size is None:
        scale = per_row(parts, "weight_scale", scale, len(weight)).expand(len(weight), 1)
        zero = zero.reshape(-1, 1).expand(len(weight), 1) if isinstance(zero, Tensor) else zero
    else:
        size = parts.group(weight_format.group_size, weight.shape[1])
        parts.check_shape("weight_scale", scale, (len(weight), weight.shape[1] // size))
    return grouped(weight, scale, zero)


def read_zeros(parts: Parts, scale: Tensor) -> Tensor:
    return parts.take("weight_zero_point", (torch.int8, torch.int32), shape=scale.shape)


def per_row(parts: Parts, name: str, scale: Tensor, rows: int) -> Tensor:
    """Return a scale per tensor or per row as [1, 1] or [rows, 1]."""
    if scale.numel() not in (1, rows):
        raise parts.wrong(
            name, f"has shape {list(scale.shape)}; a number or one per row ({rows}) is needed"
        )
    return scale.float().reshape(-1, 1)


def dequantise_bnb8(parts: Parts, weight_format: Bnb8Format) -> Tensor:
    del weight_format
    if "weight_format" in parts:
        layout = parts.take("weight_format", (torch.uint8,))
        if layout.numel() and int(layout.max()) != 0:
            raise parts.wrong("weight_format", "names a tiled layout: save the model again")
    weight = parts.matrix("weight", (torch.int8,))
    largest = parts.take("SCB", shape=(len(weight),))
    return (weight.float() * largest.float()[:, None]).mul_(BNB_STEP)
