"""What files of images hold: two of equal requests differ in the id of their receipt alone."""

from __future__ import annotations

import base64
import io

from PIL import Image


def pixel_bytes(data: str | bytes) -> bytes:
    """Return the pixels of a file, which may be in base64."""
    with Image.open(_file(data)) as image:
        return image.convert("RGB").tobytes()


def texts_of(data: str | bytes) -> dict[str, str]:
    """Return the text chunks of a file by their keys."""
    with Image.open(_file(data)) as image:
        image.load()
        return {key: text for key, text in image.info.items() if isinstance(text, str)}


def _file(data: str | bytes) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data)
