"""What `loramux draw` asks for and shows, wherever the images are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from loramux.cli.console import ByteView, working
from loramux.config.images import ImageConfig
from loramux.errors import InvalidRequest
from loramux.models.locate import located_images

if TYPE_CHECKING:
    from loramux.diffusion.image_pipeline import ImagePipeline

IMAGE_CONFIG = typer.Option(
    metavar="MODEL",
    help="The folder or repository with the configuration of an image model that is a single file, "
    "and with the components that the file lacks.",
)

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags that describe an image."""

    prompt: str
    adapters: list[str] | None
    negative_prompt: str
    size: str | None
    steps: int | None
    guidance_scale: float | None
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is shown of finished images."""

    size: str
    seed: str
    digests: list[tuple[str, str]]
    """Adapters and pixel digest of each image."""
    seconds: str
    warnings: Sequence[str] = ()


def load_image_model(model: str, config: str | None) -> ImagePipeline:
    """Load an image model for a command, and show its download."""
    # Imported here: torch and diffusers take seconds, and `--help` needs neither.
    from loramux.diffusion.image_pipeline import ImagePipeline

    with ByteView() as downloads:
        images = ImageConfig(image_model=model, image_config=config)
        located = located_images(images, sink=downloads)
    with working("Loading the image model"):
        return ImagePipeline(str(located.image_model), config=located.image_config)


def split_weight(text: str) -> tuple[str, float | None]:
    """Read NAME[:WEIGHT]; a name may have colons itself."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, None
    try:
        return name, float(weight)
    except ValueError:
        return text, None


def selected(adapters: list[str], weights: dict[str, float]) -> dict[str, float]:
    """Return the weights by name: those given, else those of `weights`, else 1."""
    chosen: dict[str, float] = {}
    for text in adapters:
        name, weight = split_weight(text)
        if name in chosen:
            raise InvalidRequest(f"--adapter names {name} twice.")
        chosen[name] = weights.get(name, 1.0) if weight is None else weight
    return chosen
