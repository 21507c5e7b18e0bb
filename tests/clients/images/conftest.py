"""One server of images for all clients of a session."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from PIL import Image

from tests.clients.live import IMAGE_ADAPTERS, Live, image_server


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """LORAMUX_IMAGES_URL names a server that runs already, for work on a single test."""
    if running := os.environ.get("LORAMUX_IMAGES_URL"):
        yield Live(running)
        return
    adapters = [f"{name}={{folder}}/{name}.safetensors@0.8" for name in IMAGE_ADAPTERS]
    flags = ["--image-lora", *adapters, "--image-default-lora", IMAGE_ADAPTERS[0]]
    with image_server(tmp_path_factory.mktemp("images"), *flags) as started:
        yield started


@pytest.fixture
def photo() -> Image.Image:
    small = Image.new("RGB", (2, 2), "navy")
    small.putpixel((0, 0), (250, 120, 0))
    return small.resize((32, 32), Image.Resampling.BICUBIC)


@pytest.fixture
def photo_file(photo: Image.Image) -> bytes:
    out = io.BytesIO()
    photo.save(out, "PNG")
    return out.getvalue()
