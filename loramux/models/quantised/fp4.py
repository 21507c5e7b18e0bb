"""4-bit floats: MXFP4 and NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.models.quantised.codes import E8M0_DTYPES, e2m1_values, grouped, powers_of_two
from loramux.models.quantised.parts import Parts
from loramux.types.quantisation import Fp4Format


def dequantise_fp4(parts: Parts, weight_format: Fp4Format) -> Tensor:
    if "blocks" in parts:
        return dequantise_blocks(parts)
    packed = parts.matrix("weight_packed" if "weight_packed" in parts else "weight", (torch.uint8,))
    out, inputs = packed.shape[0], 2 * packed.shape[1]
    shape = (out, inputs // parts.group(weight_format.block_size, inputs))
    if weight_format.block_size == 32:
        scale = powers_of_two(parts.take("weight_scale", E8M0_DTYPES, shape=shape))
    else:
        fp8 = parts.take("weight_scale", (torch.float8_e4m3fn,), shape=shape).float()
        scale = with_global(parts, fp8, divides=weight_format.divides_by_global)
    return grouped(e2m1_values(packed), scale)


def with_global(parts: Parts, scale: Tensor, *, divides: bool) -> Tensor:
    """Apply the scale of the tensor, which compressed-tensors stores as its inverse."""
    name = "weight_global_scale" if divides else "weight_scale_2"
    factor = parts.take(name).float()
    if factor.numel() != 1:
        raise parts.wrong(name, f"has shape {list(factor.shape)}, not one number")
    return scale / factor.reshape(()) if divides else scale * factor.reshape(())


def dequantise_blocks(parts: Parts) -> Tensor:
    """Decode the experts of gpt-oss: [experts, out, blocks, 16] bytes to [experts, in, out]."""
    packed = parts.take("blocks", (torch.uint8,))
    if packed.ndim != 4:
        raise parts.wrong("blocks", f"has shape {list(packed.shape)}, not four dimensions")
    scale = parts.take("scales", E8M0_DTYPES, shape=packed.shape[:3])
    values = e2m1_values(packed) * powers_of_two(scale)[..., None]
    return values.flatten(2).transpose(1, 2)
