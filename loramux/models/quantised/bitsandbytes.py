"""bitsandbytes nf4 and fp4, the bases of QLoRA, with or without double quantisation."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from loramux.models.quantised.parts import FLOATS, Parts
from loramux.types.quantisation import Bnb4Format

STATE = "weight.quant_state.bitsandbytes__"
CODES = 16
NESTED_CODES = 256
# Codes may be stored under another dtype of the same bytes, for sharding.
STORAGE = (torch.uint8, torch.int8, *FLOATS)


def dequantise_bnb4(parts: Parts, weight_format: Bnb4Format) -> Tensor:
    """Decode blocks of the flat weight; the first element of a byte is in its high bits."""
    state = read_state(parts, weight_format)
    shape = [int(size) for size in state["shape"]]
    count, size = math.prod(shape), int(state["blocksize"])
    packed = parts.take("weight", STORAGE).contiguous().view(torch.uint8).flatten()
    if 2 * len(packed) != count + count % 2:
        raise parts.wrong("weight", f"has {len(packed)} bytes for {count} codes of 4 bits")
    table = parts.take("weight.quant_map", shape=(CODES,)).float()
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
    largest = read_largest(parts, state, -(-count // size))
    values = table[codes.int()]
    values = torch.nn.functional.pad(values[:count], (0, -count % size)).view(-1, size)
    return (values * largest[:, None]).flatten()[:count].view(shape)


def read_state(parts: Parts, weight_format: Bnb4Format) -> dict[str, Any]:
    """Return the settings that the file keeps as JSON in a tensor of bytes."""
    name = STATE + weight_format.table
    content = parts.take(name, (torch.uint8,))
    try:
        state = json.loads(bytes(content.tolist()))
        shape, size = state["shape"], int(state["blocksize"])
        if not (size > 0 and all(int(extent) > 0 for extent in shape)):
            raise ValueError("sizes must be positive")
    except (ValueError, KeyError, TypeError) as error:
        raise parts.wrong(name, f"is not the state of a quantised weight: {error}") from None
    return dict(state)


def read_largest(parts: Parts, state: dict[str, Any], blocks: int) -> Tensor:
    """Return the largest magnitude of each block, which may be quantised itself."""
    if "nested_absmax" not in [name.removeprefix("weight.") for name in parts.names]:
        return parts.take("weight.absmax", (torch.float32,), shape=(blocks,))
    codes = parts.take("weight.absmax", (torch.uint8,), shape=(blocks,))
    size = int(state["nested_blocksize"])
    nested = parts.take("weight.nested_absmax", shape=(-(-blocks // size),)).float()
    table = parts.take("weight.nested_quant_map", shape=(NESTED_CODES,)).float()
    scaled = table[codes.int()] * nested.repeat_interleave(size)[:blocks]
    return scaled + float(state["nested_offset"])
