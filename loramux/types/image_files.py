"""Reads the size of image files from their headers, without decoding pixels."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from loramux.errors import InvalidRequest

MAX_SOURCE_PIXELS = 2**25
"""Limit of one file."""
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# Frame headers; the other markers of this range are tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN = 0xDA
_JPEG_EXIF = 0xE1
_EXIF_START = b"Exif\0\0"
_ORIENTATION = 0x0112
# EXIF orientations that exchange width and height.
_SIDEWAYS = (5, 6, 7, 8)


def measure(data: bytes, what: str) -> tuple[int, int]:
    """Return (width, height) as the image is shown.

    Raises InvalidRequest, which names `what`, for other formats and too many pixels.
    """
    try:
        size = _size(data)
    except (struct.error, IndexError, ValueError):
        size = None
    if size is None or not all(size):
        raise unreadable(what)
    width, height = size
    if width * height > MAX_SOURCE_PIXELS:
        raise InvalidRequest(
            f"The {what} has {width}x{height} pixels, and at most {MAX_SOURCE_PIXELS} are read. "
            "Scale it down.",
            param=what,
        )
    return width, height


def unreadable(what: str) -> InvalidRequest:
    return InvalidRequest(f"The {what} cannot be read as PNG, JPEG or WebP.", param=what)


def _size(data: bytes) -> tuple[int, int] | None:
    if data.startswith(_PNG):
        return _png(data)
    if data.startswith(_JPEG):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return None


def _png(data: bytes) -> tuple[int, int] | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int] | None:
    orientation = 1
    for marker, start, end in _jpeg_segments(data):
        if marker == _JPEG_EXIF and data.startswith(_EXIF_START, start):
            orientation = _orientation(data[start + len(_EXIF_START) : end])
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, start + 1)
            return (height, width) if orientation in _SIDEWAYS else (width, height)
    return None


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of the contents up to the first scan."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == _JPEG_SCAN:
            return
        (length,) = struct.unpack_from(">H", data, at + 2)
        yield marker, at + 4, at + 2 + length
        at += 2 + max(length, 2)


def _orientation(tiff: bytes) -> int:
    """Return the orientation of the first directory, or 1."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        if order is not None:
            (at,) = struct.unpack_from(order + "I", tiff, 4)
            (count,) = struct.unpack_from(order + "H", tiff, at)
            for entry in range(at + 2, at + 2 + 12 * count, 12):
                (tag,) = struct.unpack_from(order + "H", tiff, entry)
                if tag == _ORIENTATION:
                    (value,) = struct.unpack_from(order + "H", tiff, entry + 8)
                    return int(value)
    except struct.error:
        pass
    return 1


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None
