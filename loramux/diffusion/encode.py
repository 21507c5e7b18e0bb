"""Encodes images as files."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from loramux.backend.images import ImageForm


def encode_image(image: Tensor, form: ImageForm) -> bytes:
    """Encode [height, width, 3] bytes; PNG keeps every pixel, and carries the form's texts."""
    out = io.BytesIO()
    options: dict[str, Any] = {"quality": form.compression}
    if form.format == "png":
        options = {"pnginfo": PngInfo()}
        for key, text in form.texts:
            options["pnginfo"].add_text(key, text)
    Image.fromarray(image.numpy()).save(out, form.format, **options)
    return out.getvalue()
