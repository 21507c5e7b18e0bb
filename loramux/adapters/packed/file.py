"""A packed adapter as one file: a header, then the buffer in the layout of the kernels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from loramux.adapters.packed.dense import IMAGE_HEADER_BYTES
from loramux.adapters.packed.image import AdapterImage, AdapterLayout, Allocate, mapped_buffer
from loramux.adapters.packed.packing import Packing
from loramux.base.private_files import private_opener
from loramux.errors import AdapterRefused

_MAGIC = b"loramux image 1\n"
_MAX_HEADER = 16 * 2**20
_MAX_LAYOUTS = 256

# Bytes per read: small enough to be in a cache when it is hashed and passed on. Smaller reads take
# the GIL more often, which delays concurrent steps more than the load's work does.
SLICE_BYTES = 4 * 2**20


class OnSlice(Protocol):
    def __call__(self, start: int, data: memoryview, *, is_last: bool) -> None:
        """Receives bytes of the buffer from `start` on; the checksum is not verified yet."""


class KnownLayouts:
    """Caches layouts: most adapters share a few, and planning one holds the GIL."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._layouts: dict[str, AdapterLayout] = {}

    def find(self, key: Sequence[Any], extras_key: Sequence[Any] = ()) -> AdapterLayout:
        text = json.dumps([key, extras_key])
        layout = self._layouts.get(text)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[text] = self._packing.layout_of(key, extras_key)
        return layout


def write_image(path: Path, image: AdapterImage) -> None:
    """Write the file atomically: a reader sees the whole file or none."""
    payload = _as_bytes(image.buffer)
    fields: dict[str, object] = {
        "cid": image.cid,
        "dtype": str(image.buffer.dtype),
        "num_elements": image.buffer.numel(),
        "layout": image.layout.key,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    extras = image.layout.extras
    if extras.specs:
        page_bytes = extras.page_width * image.buffer.element_size()
        fields |= {"extras": extras.key, "page_bytes": page_bytes}
    header = json.dumps(fields).encode()
    head = _MAGIC + len(header).to_bytes(8, "little") + header
    # The buffer starts at a page boundary, so that it can be mapped.
    size = _padded(len(head))
    partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.partial")
    try:
        with open(partial, "wb", buffering=0, opener=private_opener) as file:
            _write_all(file.fileno(), memoryview(head.ljust(size, b"\0")))
            _write_all(file.fileno(), payload)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def read_image(
    path: Path,
    cid: str,
    layouts: KnownLayouts,
    allocate: Allocate = mapped_buffer,
    on_slice: OnSlice | None = None,
) -> AdapterImage:
    """Read an image; raise FileNotFoundError, or AdapterRefused when the file is invalid."""
    with path.open("rb", buffering=0) as file:
        found = _read_header(file.fileno(), path)
        try:
            layout = layouts.find(
                cast(Sequence[Any], found["layout"]), cast(Sequence[Any], found.get("extras", ()))
            )
            dtype = getattr(torch, str(found["dtype"]).removeprefix("torch."))
            if found.get("page_bytes", 0) != layout.extras.page_width * dtype.itemsize:
                raise _broken(path, "it was made for pages of another size")
            if found["cid"] != cid or found["num_elements"] != layout.num_elements:
                raise _broken(path, "it holds another adapter")
            buffer = allocate(layout.num_elements, dtype)
            if _read_all(file.fileno(), _as_bytes(buffer), path, on_slice) != found["sha256"]:
                raise _broken(path, "its checksum is wrong")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _broken(path, f"its header is wrong ({error!r})") from error
    return AdapterImage(cid=cid, layout=layout, buffer=buffer)


def _read_header(descriptor: int, path: Path) -> dict[str, object]:
    prefix = os.read(descriptor, len(_MAGIC) + 8)
    length = int.from_bytes(prefix[len(_MAGIC) :], "little")
    if not prefix.startswith(_MAGIC) or not 0 < length < _MAX_HEADER:
        raise _broken(path, "it is not an image file")
    header = os.read(descriptor, length)
    os.lseek(descriptor, _padded(len(prefix) + length), os.SEEK_SET)
    try:
        found = json.loads(header)
    except ValueError as error:
        raise _broken(path, "its header is cut off") from error
    if not isinstance(found, dict):
        raise _broken(path, "its header is not an object")
    return found


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // IMAGE_HEADER_BYTES) * IMAGE_HEADER_BYTES


def _as_bytes(buffer: torch.Tensor) -> memoryview:
    """Return a view of the buffer's memory."""
    view: memoryview = buffer.view(torch.uint8).numpy().data
    return view


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:SLICE_BYTES]) :]


def _read_all(descriptor: int, out: memoryview, path: Path, on_slice: OnSlice | None) -> str:
    """Fill out and return the digest of its content."""
    digest = hashlib.sha256()
    start = 0
    while start < len(out):
        stop = start + os.readv(descriptor, [out[start : start + SLICE_BYTES]])
        if stop == start:
            raise _broken(path, "it is cut off")
        data = out[start:stop]
        digest.update(data)
        if on_slice is not None:
            on_slice(start, data, is_last=stop == len(out))
        start = stop
    return digest.hexdigest()


def _broken(path: Path, why: str) -> AdapterRefused:
    return AdapterRefused("broken_image", f"The cached image {path} cannot be used: {why}.")
