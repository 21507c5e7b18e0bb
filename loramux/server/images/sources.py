"""Source images in requests: base64 as bytes, and the size of a drawing that follows its source."""

from __future__ import annotations

import binascii

from loramux.backend.images import ImageCard
from loramux.errors import InvalidRequest
from loramux.types.image import SourceImage
from loramux.types.image_files import measure

_DATA_URL = "data:"


def decode_base64(text: str, param: str) -> bytes:
    """Decode base64 or a data URL with base64."""
    if text.startswith(_DATA_URL):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(f"{param} must be a data URL with base64.", param=param)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"{param} must be the base64 of a PNG, JPEG or WebP file, not an address.", param=param
        ) from error


def check_files(source: SourceImage) -> SourceImage:
    """Refuses files of other formats and with too many pixels by their headers."""
    measure(source.image, "image")
    if source.mask is not None:
        measure(source.mask, "mask")
    return source


def size_of(card: ImageCard, source: SourceImage) -> tuple[int, int]:
    """Return the width and height of a drawing that follows its source."""
    return card.size_like(*measure(source.image, "image"))
