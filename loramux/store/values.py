"""Checks the values of a weights file without torch, before it gets a name that requests use."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import numpy as np

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.errors import AdapterRefused

_SLICE_BYTES = 16 * 2**20
# A value whose square overflows float32 makes every activation that it meets NaN or infinite.
LARGEST = math.sqrt(float(np.finfo(np.float32).max))
# Unsigned type, bits of +infinity and bits of LARGEST (None: infinity is nearer).
_FORMATS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int | None]] = {
    "F64": (np.uint64, 0x7FF << 52, int(np.float64(LARGEST).view(np.uint64))),
    "F32": (np.uint32, 0xFF << 23, int(np.float32(LARGEST).view(np.uint32))),
    "BF16": (np.uint16, 0xFF << 7, int(np.float32(LARGEST).view(np.uint32)) >> 16),
    "F16": (np.uint16, 0x1F << 10, None),
    # The first has no infinity: these are the bits of NaN.
    "F8_E4M3": (np.uint8, 0x7F, None),
    "F8_E5M2": (np.uint8, 0x1F << 2, None),
}


def check_finite(file: BinaryIO, data_start: int, entries: tuple[TensorEntry, ...]) -> None:
    """Refuses NaN, infinity and values that overflow; raises AdapterRefused."""
    for entry in entries:
        kind, infinity, limit = _FORMATS[entry.dtype]
        largest = _largest_bits(file, data_start + entry.start, entry.num_bytes, kind)
        if largest >= infinity:
            raise AdapterRefused(
                RefusalCode.NOT_FINITE,
                f"{entry.name} has NaN or infinite values.",
                fix="The training diverged; give an earlier checkpoint.",
            )
        if limit is not None and largest > limit:
            raise AdapterRefused(
                "overflow",
                f"{entry.name} has a value above {LARGEST:.1e}, with which activations overflow.",
                fix="The training diverged; give an earlier checkpoint.",
            )


def _largest_bits(
    file: BinaryIO, start: int, num_bytes: int, kind: type[np.unsignedinteger[Any]]
) -> int:
    """Return the bits of the largest absolute value: they are ordered as the values are."""
    magnitude = kind(np.iinfo(kind).max >> 1)
    file.seek(start)
    largest = 0
    while num_bytes:
        content = file.read(min(num_bytes, _SLICE_BYTES))
        if not content:
            break
        num_bytes -= len(content)
        largest = max(largest, int((np.frombuffer(content, kind) & magnitude).max()))
    return largest
