"""Reads the metadata and the tensors of a GGUF file.

The reader of the package `gguf` makes an array for each of some 100,000 strings of a tokenizer,
which takes seconds at each start.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from loramux.errors import UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# The number types of metadata, little-endian.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_DEFAULT_ALIGNMENT = 32


class Metadata(dict[str, Any]):
    """GGUF metadata; a missing key raises UnsupportedModel."""

    def __missing__(self, key: str) -> Any:
        raise UnsupportedModel(f"The GGUF file lacks {key}.")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Rows first, as in a checkpoint."""
    kind: GGMLQuantizationType
    data: NDArray[np.uint8]
    """The bytes of each row of values."""


@dataclass(frozen=True, slots=True)
class GgufContents:
    metadata: Metadata
    tensors: list[GgufTensor]


def read_gguf(path: Path) -> GgufContents:
    """Read a file, whose tensors stay on disk until they are used; raises UnsupportedModel."""
    try:
        with path.open("rb") as file:
            return _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).read()
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise UnsupportedModel(f"{path} is not a readable GGUF file: {error}.") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GgufContents:
        magic, version = self._bytes(4), self._u32()
        if magic != _MAGIC or version not in _VERSIONS:
            raise ValueError(f"it begins with {magic!r} and version {version}, which are not known")
        num_tensors, num_entries = self._u64(), self._u64()
        metadata = Metadata(self._table(num_entries, lambda: self._value(self._u32())))
        entries = self._table(num_tensors, self._tensor_entry)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = [self._tensor(name, start, *entry) for name, entry in entries.items()]
        return GgufContents(metadata, tensors)

    def _table(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for _ in range(count):
            name = self._string()
            if name in table:
                raise ValueError(f"{name} is there twice")
            table[name] = read()
        return table

    def _tensor_entry(self) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        shape = self._array(self._u32(), "<u8")
        return tuple(reversed(shape)), GGMLQuantizationType(self._u32()), self._u64()

    def _tensor(
        self, name: str, start: int, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> GgufTensor:
        block, num_bytes = GGML_QUANT_SIZES[kind]
        width = shape[-1] if shape else 1
        if width % block:
            raise ValueError(f"{name} has rows of {width} values, in blocks of {block}")
        stored = (*shape[:-1], width // block * num_bytes)
        data = np.frombuffer(self._data, np.uint8, prod(stored), start + offset)
        return GgufTensor(name, shape, kind, data.reshape(stored))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._array(1, _NUMBERS[kind])[0]
        inner, count = self._u32(), self._u64()
        if inner in _NUMBERS:
            return self._array(count, _NUMBERS[inner])
        if inner != _STRING:
            raise ValueError(f"an array has values of type {inner}, which is not known")
        return [self._string() for _ in range(count)]

    def _array(self, count: int, dtype: str) -> list[Any]:
        found = np.frombuffer(self._data, dtype, count, self._at)
        self._at += found.nbytes
        values: list[Any] = found.tolist()
        return values

    def _string(self) -> str:
        return self._bytes(self._u64()).decode()

    def _bytes(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise ValueError("it is cut off")
        self._at += count
        return found

    def _u32(self) -> int:
        return self._integer("<I", 4)

    def _u64(self) -> int:
        return self._integer("<Q", 8)

    def _integer(self, code: str, size: int) -> int:
        (found,) = struct.unpack_from(code, self._data, self._at)
        self._at += size
        return int(found)
