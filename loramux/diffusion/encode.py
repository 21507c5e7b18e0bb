"""Encodes images as files."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from loramux.image_backend import ImageForm


def encode_image(image: Tensor, form: ImageForm) -> bytes:
    """Encodes [height, width, 3] bytes; PNG keeps every pixel."""
    out = io.BytesIO()
    options = {} if form.format == "png" else {"quality": form.compression}
    Image.fromarray(image.numpy()).save(out, form.format, **options)
    return out.getvalue()


def sheet(images: Sequence[Image.Image], enlarge: int = 1) -> Image.Image:
    """Puts images of one size side by side; every pixel becomes `enlarge` x `enlarge`."""
    width, height = images[0].size
    whole = Image.new("RGB", (width * len(images), height))
    for index, image in enumerate(images):
        whole.paste(image, (index * width, 0))
    return whole.resize((whole.width * enlarge, height * enlarge), Image.Resampling.NEAREST)
