"""Reads the weights file of an adapter folder in slices, and hashes the bytes that it read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from loramux.adapters.identity import FileDigest
from loramux.adapters.packed.image import mapped_memory
from loramux.adapters.peft.folder import open_real, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    TensorEntry,
    find_weights,
    parse_header,
    read_head,
)
from loramux.adapters.workers import CALLING_THREAD, Workers
from loramux.errors import AdapterRefused

SLICE_BYTES = 4 * 2**20
ALIGN_BYTES = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

ParseHeader = Callable[[bytes, int], tuple[TensorEntry, ...]]
"""Takes a header and the number of bytes that follow it."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    tensors: Mapping[str, torch.Tensor]
    digest: FileDigest


class WeightsReading:
    """The bytes of a weights file, while workers read them into memory of this process.

    The file is read once, so that the hashed bytes are the served bytes.
    """

    def __init__(self, weights: WeightsFile, workers: Workers) -> None:
        self._weights = weights
        data_start = len(weights.head)
        padding = -data_start % ALIGN_BYTES
        memory = mapped_memory(padding + weights.size)
        self._bytes = memoryview(memory)[padding:]
        self._slices = [
            (start, workers.start(partial(self._read, start)))
            for start in range(0, weights.size, SLICE_BYTES)
        ]
        self._data = self._bytes[data_start:]

    def wait(self) -> None:
        """Wait until all bytes are read; raise AdapterRefused."""
        for _, done in self._slices:
            done()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views of the bytes, which are valid after wait(); 8-bit floats as bfloat16."""
        return {entry.name: self._tensor(entry) for entry in self._weights.entries}

    def digest(self) -> FileDigest:
        """Hashes the slices as they arrive; refuses a file that changed meanwhile."""
        digest = hashlib.sha256()
        for start, done in self._slices:
            done()
            digest.update(self._bytes[start : start + SLICE_BYTES])
        weights = self._weights
        with refusing_os_errors(weights.path):
            is_longer = os.pread(weights.file.fileno(), 1, weights.size)
        if is_longer or self._bytes[: len(weights.head)] != weights.head:
            raise changed_while_read()
        return FileDigest(digest.hexdigest(), weights.size)

    def finish(self) -> None:
        """Wait until no worker uses the file any more."""
        for _, done in self._slices:
            with suppress(AdapterRefused):
                done()

    def _read(self, start: int) -> None:
        weights = self._weights
        left = self._bytes[start : start + SLICE_BYTES]
        with refusing_os_errors(weights.path):
            while left:
                count = os.preadv(weights.file.fileno(), [left], start)
                if not count:
                    raise changed_while_read()
                start, left = start + count, left[count:]

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        dtype, count = DTYPES[entry.dtype], math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
        if entry.start % dtype.itemsize:
            # Data that follows a tensor of a smaller type may be unaligned.
            self.wait()
            # torch copies gigabytes without the interpreter lock.
            unaligned = torch.frombuffer(
                self._data, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
            )
            flat = unaligned.clone().view(dtype)
        else:
            flat = torch.frombuffer(self._data, dtype=dtype, count=count, offset=entry.start)
        if dtype.itemsize == 1:
            # torch computes little with 8-bit floats, and bfloat16 holds all their values.
            self.wait()
            flat = flat.to(torch.bfloat16)
        return flat.view(entry.shape)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """An open weights file; `entries` are the tensors of its header, which was checked."""

    path: Path
    file: BinaryIO
    size: int
    head: bytes
    """The length of the header, and the header."""
    entries: tuple[TensorEntry, ...]

    @contextmanager
    def reading(self, workers: Workers = CALLING_THREAD) -> Iterator[WeightsReading]:
        """Start to read the file; at the end no worker uses it any more."""
        reading = WeightsReading(self, workers)
        try:
            yield reading
        finally:
            reading.finish()

    def load(self) -> LoadedWeights:
        with self.reading() as reading:
            return LoadedWeights(reading.tensors(), reading.digest())


@contextmanager
def open_weights(folder: Path, parse: ParseHeader = parse_header) -> Iterator[WeightsFile]:
    """Open the weights of an adapter folder and check their header with `parse`."""
    path = find_weights(folder)
    with refusing_os_errors(path):
        file = open_real(path)
    with file:
        with refusing_os_errors(path):
            size = os.fstat(file.fileno()).st_size
            head = read_head(file, size)
        entries = parse(head[LENGTH_BYTES:], size - len(head))
        yield WeightsFile(path, file, size, head, entries)


def changed_while_read() -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.UNREADABLE,
        f"{WEIGHTS_NAME} changed while it was read.",
        fix="Write adapters to a new folder and rename it into place.",
    )
