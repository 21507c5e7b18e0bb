"""Reads and checks the header of an untrusted safetensors file, without torch."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from loramux.adapters.peft.folder import find_file, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.errors import AdapterRefused

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 2**20
MAX_FILE_BYTES = 8 * 2**30
MAX_NAME_CHARS = 1024
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGICS = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
LFS_MAGIC = b"version https://git-lfs"
# Smaller files are hashed in no time, whatever they hold.
_MIN_SPARSE_BYTES = 16 * 2**20
_MAX_EXTENTS = 4096
SAVE_AGAIN = "Save or download the adapter again."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def find_weights(folder: Path) -> Path:
    path = find_file(folder, WEIGHTS_NAME)
    if path is not None:
        refuse_sparse(path)
        return path
    for name in PICKLE_NAMES:
        if find_file(folder, name) is not None:
            raise pickle_refused(f"The folder has the weights only as {name}, a pickle")
    raise AdapterRefused(
        RefusalCode.WEIGHTS_MISSING,
        f"The folder has no {WEIGHTS_NAME}.",
        fix="Give the folder that PEFT's save_pretrained wrote.",
    )


def refuse_sparse(path: Path) -> None:
    """Refuses a file of holes, which would be hashed for a minute although the disk has little."""
    with refusing_os_errors(path):
        status = path.stat()
        size = status.st_size
        if size < _MIN_SPARSE_BYTES or 2 * 512 * status.st_blocks >= size:
            return
        with path.open("rb") as file:
            data = _data_bytes(file, size)
    if 2 * data < size:
        raise AdapterRefused(
            RefusalCode.BROKEN_SAFETENSORS,
            f"{path.name} is sparse: {data} of its {size} bytes are on the disk.",
            fix="Save the adapter again, or copy it with `cp --sparse=never` if it is whole.",
        )


def _data_bytes(file: BinaryIO, size: int) -> int:
    """Return the bytes of a file that are no holes; all, if the file system does not tell."""
    total = at = 0
    for _ in range(_MAX_EXTENTS):
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            # Only holes follow.
            return total if error.errno == errno.ENXIO else size
        at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        total += at - start
        if at >= size:
            break
    return total


def read_head(file: BinaryIO, size: int) -> bytes:
    """Return the eight bytes of the header's length, followed by the header."""
    start = file.read(LENGTH_BYTES + len(LFS_MAGIC))
    if start.startswith(LFS_MAGIC):
        raise AdapterRefused(
            RefusalCode.LFS_POINTER,
            f"{WEIGHTS_NAME} is a git-lfs pointer, not the weights.",
            fix="Run `git lfs pull` in the repository that it came from.",
        )
    if size > MAX_FILE_BYTES:
        raise AdapterRefused(
            RefusalCode.TOO_LARGE,
            f"{WEIGHTS_NAME} has {size} bytes; at most {MAX_FILE_BYTES} are read.",
            fix="Save the adapter in bfloat16, or without tensors that it did not train.",
        )
    if size < LENGTH_BYTES:
        raise truncated(f"it has {size} bytes, too few for a header")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > size:
        raise explain_bad_length(start, length, size)
    return start[: LENGTH_BYTES + length] + file.read(max(0, length - len(LFS_MAGIC)))


def explain_bad_length(start: bytes, length: int, size: int) -> AdapterRefused:
    if start.startswith((ZIP_MAGIC, *PICKLE_MAGICS)):
        return pickle_refused(f"{WEIGHTS_NAME} holds a pickle")
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        return AdapterRefused(
            RefusalCode.NOT_SAFETENSORS,
            f"{WEIGHTS_NAME} is not a safetensors file.",
            fix=SAVE_AGAIN,
        )
    if length > MAX_HEADER_BYTES:
        return AdapterRefused(
            RefusalCode.OVERSIZED_HEADER,
            f"{WEIGHTS_NAME} says that its header has {length} bytes; at most {MAX_HEADER_BYTES} "
            "are allowed.",
            fix=SAVE_AGAIN,
        )
    return truncated(f"its header should have {length} bytes, the whole file has {size}")


def parse_header(header: bytes, data_bytes: int) -> tuple[TensorEntry, ...]:
    """Return the tensors in the order of their data; refuse gaps and overlaps."""
    fields = decode_header(header)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken("its metadata is not an object of strings")
    entries = sorted(
        (parse_entry(name, entry) for name, entry in fields.items()),
        key=lambda entry: (entry.start, entry.end),
    )
    position = 0
    for entry in entries:
        if entry.start != position:
            raise broken(f"the data of {entry.name!r} overlaps other data or leaves a gap")
        position = entry.end
    if position > data_bytes:
        raise truncated(f"its tensors need {position} bytes, the file has {data_bytes}")
    if position < data_bytes:
        raise broken(f"{data_bytes - position} bytes at its end belong to no tensor")
    check_dtypes(entries)
    return tuple(entries)


def read_metadata(head: bytes) -> dict[str, object]:
    """Return the metadata in the start of a file that `read_head` has read."""
    metadata = decode_header(head[LENGTH_BYTES:]).get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def decode_header(header: bytes) -> dict[str, object]:
    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise broken(f"its header is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise broken("its header is not a JSON object")
    return fields


def unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def parse_entry(name: str, entry: object) -> TensorEntry:
    if len(name) > MAX_NAME_CHARS:
        raise broken(f"the name of a tensor has over {MAX_NAME_CHARS} characters")
    if not isinstance(entry, dict):
        raise broken(f"the entry of {name!r} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not is_sizes(shape) or not is_sizes(offsets):
        raise broken(f"the entry of {name!r} lacks a valid dtype, shape or data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"the data_offsets of {name!r} are not a start and an end")
    parsed = TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1])
    # Empty tensors need no bytes, and their other dimensions overflow the strides.
    if math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        raise broken(f"the shape of {name!r} has a dimension that is too large")
    # An unsupported dtype is refused later; its size is not checked here.
    expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and parsed.num_bytes != expected:
        raise broken(f"{name!r} needs {expected} bytes and has {parsed.num_bytes}")
    return parsed


def is_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def check_dtypes(entries: list[TensorEntry]) -> None:
    wrong = [f"{entry.name} ({entry.dtype})" for entry in entries if entry.dtype not in ITEM_BYTES]
    if wrong:
        raise AdapterRefused(
            RefusalCode.BAD_DTYPE,
            f"Tensors must be one of {', '.join(ITEM_BYTES)}; found {name_some(wrong)}.",
            fix="Save the adapter in float32, float16 or bfloat16.",
        )


def broken(detail: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.BROKEN_SAFETENSORS, f"{WEIGHTS_NAME} is broken: {detail}.", fix=SAVE_AGAIN
    )


def truncated(detail: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.TRUNCATED, f"{WEIGHTS_NAME} is cut short: {detail}.", fix=SAVE_AGAIN
    )


def pickle_refused(what: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.PICKLE,
        f"{what}, which can run code when it is opened.",
        fix="Run `loramux convert FOLDER --out NEW_FOLDER`, which reads the tensors alone, or save "
        "the adapter with safe_serialization=True.",
    )
