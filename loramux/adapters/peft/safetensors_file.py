"""A safetensors file from an untrusted place: its header first, its tensors when that is sound."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from loramux.adapters.identity import FileDigest
from loramux.adapters.peft.folder import refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors_header import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    TensorEntry,
    broken,
    find_weights,
    parse_header,
    read_head,
)
from loramux.errors import AdapterRefused


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    tensors: dict[str, torch.Tensor]
    digest: FileDigest


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """An open file whose header has been checked."""

    path: Path
    file: BinaryIO
    size: int
    head: bytes
    entries: tuple[TensorEntry, ...]

    def load(self) -> LoadedWeights:
        """Reads the file once: what is hashed is what is served."""
        with refusing_os_errors(self.path):
            self.file.seek(0)
            content = self.file.read(self.size + 1)
        if len(content) != self.size or not content.startswith(self.head):
            raise AdapterRefused(
                RefusalCode.UNREADABLE,
                f"{WEIGHTS_NAME} changed while it was read.",
                fix="Write adapters to a new folder and rename it into place.",
            )
        digest = FileDigest(hashlib.sha256(content).hexdigest(), self.size)
        try:
            tensors = safetensors.torch.load(content)
        except SafetensorError as error:
            raise broken(str(error)) from error
        return LoadedWeights(tensors, digest)


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsFile]:
    path = find_weights(folder)
    with refusing_os_errors(path):
        file = path.open("rb")
    with file:
        with refusing_os_errors(path):
            size = os.fstat(file.fileno()).st_size
            head = read_head(file, size)
        entries = parse_header(head[LENGTH_BYTES:], size - len(head))
        yield WeightsFile(path, file, size, head, entries)
