"""HQQ: codes in parts of a grouped matrix, with float zero points."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loramux.models.quantised.parts import FLOATS, Parts
from loramux.types.quantisation import HqqFormat

# Bits of a packed element and codes in it, by the bits of a code.
PACKING = {1: (1, 8), 2: (2, 4), 3: (3, 10), 4: (4, 2), 5: (8, 1), 6: (8, 1), 8: (8, 1)}
INTEGERS = (torch.int32, torch.int64, torch.uint8)


def dequantise_hqq(parts: Parts, weight_format: HqqFormat) -> Tensor:
    """Compute (code - zero) * scale in groups of the flat weight, by rows or by columns."""
    shape = read_shape(parts)
    check_settings(parts, weight_format)
    count = math.prod(shape)
    size = parts.group(weight_format.group_size, count) if weight_format.group_size else shape[1]
    # Groups are rows of the grouped matrix with axis 1, and columns with axis 0.
    rows = count // size if weight_format.axis == 1 else size
    if weight_format.group_size is None:
        rows = shape[0]
    columns = count // rows
    codes = unpack(parts, weight_format.bits, rows, columns)
    around = (rows, 1) if weight_format.axis == 1 else (1, columns)
    zero = parts.take("zero", shape=around).float()
    scale = parts.take("scale", shape=around).float()
    return ((codes.float() - zero) * scale).view(shape)


def read_shape(parts: Parts) -> tuple[int, int]:
    rows, columns = (int(size) for size in parts.take("shape", INTEGERS, shape=(2,)))
    return rows, columns


def check_settings(parts: Parts, weight_format: HqqFormat) -> None:
    """Refuse a module whose own settings differ from config.json."""
    expected = {
        "nbits": weight_format.bits,
        "axis": weight_format.axis,
        "group_size": weight_format.group_size,
        "quant_scale": 0,
        "quant_zero": 0,
    }
    for name, value in expected.items():
        if name in parts and value is not None:
            found = parts.take(name, (*INTEGERS, torch.float32)).flatten()
            if found.numel() != 1 or float(found) != value:
                raise parts.wrong(name, f"is {found.tolist()} where config.json has {value}")


def unpack(parts: Parts, bits: int, rows: int, columns: int) -> Tensor:
    """Return the codes [rows, columns]: high bits are the first part of the rows."""
    width, per_element = PACKING[bits]
    stored = torch.int32 if bits == 3 else torch.uint8
    packed = parts.take("W_q", (stored, *FLOATS))
    packed = packed.contiguous().view(stored).reshape(-1, columns)
    parts.check_shape("W_q", packed, (-(-rows // per_element), columns))
    mask = 2**width - 1
    shifts = [width * part for part in reversed(range(per_element))]
    return torch.cat([packed >> shift & mask for shift in shifts])[:rows]
