"""Writes a safetensors file one tensor at a time, without holding the model in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

FLOAT32_BYTES = 4
HEADER_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes float32 tensors in the order of `shapes`."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.waiting = list(shapes)[::-1]
        self.file = path.open("wb")
        self.file.write(header_bytes(shapes))

    def write(self, name: str, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        expected = self.waiting.pop()
        if name != expected or values.shape != self.shapes[name] or values.dtype != np.float32:
            raise ValueError(
                f"{name} {values.dtype} {values.shape} written where {expected} "
                f"float32 {self.shapes[expected]} was announced"
            )
        self.file.write(np.ascontiguousarray(values).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()
        if error is None and self.waiting:
            raise ValueError(f"{len(self.waiting)} announced tensors were not written")


def header_bytes(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the length and the JSON of the header, padded to keep the tensors aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + prod(shape) * FLOAT32_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
