"""Encodes images as files."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor

from loramux.image_backend import ImageForm


def encode_image(image: Tensor, form: ImageForm) -> bytes:
    """Encodes [height, width, 3] bytes; PNG keeps every pixel."""
    out = io.BytesIO()
    options = {} if form.format == "png" else {"quality": form.compression}
    Image.fromarray(image.numpy()).save(out, form.format, **options)
    return out.getvalue()
