"""Decodes the source image of a request and its mask, within limits."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from loramux.types.image import ImageRequest, SourceImage
from loramux.types.image_files import measure, unreadable

_FORMATS = ("PNG", "JPEG", "WEBP")
_MASK_LEVEL = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class SourcePixels:
    image: Tensor
    """[1, 3, height, width] in [-1, 1]"""
    mask: Tensor | None
    """[1, 1, height, width]: 1 where the image is drawn anew, else 0."""


def fit_source(request: ImageRequest) -> ImageRequest:
    """Decode and scale the source outside of the step loop, which then has little to decode.

    Raises InvalidRequest for files that cannot be read.
    """
    source = request.source
    if source is None:
        return request
    size = (request.width, request.height)
    mask = _mask(source, size)
    fitted = SourceImage(
        image=_file(_image(source, size)),
        mask=None if mask is None else _file(mask),
        strength=source.strength,
    )
    return msgspec.structs.replace(request, source=fitted)


def decode_source(source: SourceImage, width: int, height: int) -> SourcePixels:
    """Return the pixels at the size of the drawing; raise InvalidRequest."""
    size = (width, height)
    mask = _mask(source, size)
    return SourcePixels(
        image=2.0 * _tensor(_image(source, size)) - 1.0,
        mask=None if mask is None else (_tensor(mask) >= _MASK_LEVEL).float(),
    )


def _image(source: SourceImage, size: tuple[int, int]) -> Image.Image:
    image = _opened(source.image, "image")
    if _has_alpha(image):
        # Transparent pixels have any colour; white is what viewers show.
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _mask(source: SourceImage, size: tuple[int, int]) -> Image.Image | None:
    """Return the mask with white for what is drawn anew."""
    if source.mask is None:
        return None
    mask = _opened(source.mask, "mask")
    if source.masked_by == "transparency" and _has_alpha(mask):
        mask = ImageOps.invert(mask.convert("RGBA").getchannel("A"))
    else:
        mask = mask.convert("L")
        if source.masked_by == "black":
            mask = ImageOps.invert(mask)
    if source.mask_blur:
        mask = mask.filter(ImageFilter.GaussianBlur(source.mask_blur))
    return mask.resize(size, Image.Resampling.LANCZOS)


def _opened(data: bytes, what: str) -> Image.Image:
    """Decode a file whose header declares a known format and few enough pixels."""
    declared = measure(data, what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            if sorted(image.size) == sorted(declared):
                image.load()
                return ImageOps.exif_transpose(image)
    # The decoders raise errors of many kinds, struct.error and SyntaxError among them.
    except Exception as error:
        raise unreadable(what) from error
    raise unreadable(what)


def _has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _file(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=0)
    return out.getvalue()


def _tensor(image: Image.Image) -> Tensor:
    array = np.asarray(image, dtype=np.float32) / 255.0
    return torch.from_numpy(array.reshape(image.height, image.width, -1)).permute(2, 0, 1)[None]
