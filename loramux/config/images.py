"""Settings of image models: what `loramux serve` draws with, sizes and adapters as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.config.engine import DTYPES
from loramux.config.fields import AUTO, Kind, Limit, at_least, check_limits, one_of, setting
from loramux.errors import InvalidRequest

_INSTALLED = Path(__file__).parents[1] / "demo"
_CHECKOUT = Path(__file__).parents[2] / "examples" / "images"
DEMO = _INSTALLED if _INSTALLED.exists() else _CHECKOUT
"""The demo's image model and adapters: part of the wheel, and of a checkout of the sources."""
DEMO_NAME = "small-flux"
_SIZE = re.compile(r"(\d{1,5})\s*[xX×]\s*(\d{1,5})", re.ASCII)
_LORA = re.compile(r"(?P<name>[^=\s]+)=(?P<source>.+?)(?:@(?P<weight>-?\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class ImageLora:
    """An adapter of --image-lora."""

    name: str
    source: str
    weight: float = 1.0
    """Used where a request names none."""


def parse_size(text: str) -> tuple[int, int]:
    """Return (width, height) of a text such as 1024x768."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(
            f"A size is WIDTHxHEIGHT, such as 1024x768, got {text[:50]!r}.", param="size"
        )
    return int(found[1]), int(found[2])


def parse_image_lora(text: str) -> ImageLora:
    """Read name=source[@weight]."""
    found = _LORA.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(
            f"An adapter is NAME=SOURCE or NAME=SOURCE@WEIGHT, got {text[:100]!r}.",
            param="image_lora",
        )
    return ImageLora(found["name"], found["source"], float(found["weight"] or 1.0))


IMAGES = "Images"
BATCHING = ("mixed", "bucket")
MAX_IMAGE_TOKENS = 16_384
ADAPTER_MEMORY_BYTES = 2 * 2**30


def _are_loras(texts: tuple[str, ...]) -> bool:
    try:
        names = [parse_image_lora(text).name for text in texts]
    except InvalidRequest:
        return False
    return len(set(names)) == len(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The part of the settings of `loramux serve` that is about an image model."""

    is_demo: bool = setting(
        False,
        Kind.SWITCH,
        IMAGES,
        "Serve the demo's image model with its adapters.",
        name="images",
    )
    image_model: str | None = setting(
        None,
        Kind.MODEL,
        IMAGES,
        "Serve this image model: a folder that diffusers saved, org/name[@revision] on the Hugging "
        "Face hub, or a .safetensors file with --image-config. A language model is served beside "
        "it if --model, --lora-modules or --lora-dir is given.",
        metavar="MODEL",
    )
    image_config: str | None = setting(
        None,
        Kind.MODEL,
        IMAGES,
        "The folder or repository with the configuration of an image model that is a single file, "
        "and with the components that the file lacks.",
        metavar="MODEL",
    )
    image_variant: str | None = setting(
        None,
        Kind.TEXT,
        IMAGES,
        "The variant of the image model's weights, such as fp16 for *.fp16.safetensors. Default: "
        "the plain files, else the only variant.",
        metavar="NAME",
    )
    image_dtype: str = setting(
        AUTO,
        Kind.TEXT,
        IMAGES,
        f"Data type of the image model. Valid values: {', '.join(DTYPES)}; auto is float32 on a "
        "CPU and bfloat16 on a GPU.",
        metavar="TYPE",
        limit=one_of(*DTYPES),
    )
    image_offload: bool = setting(
        False,
        Kind.SWITCH,
        IMAGES,
        "Keep the text encoders and the VAE of the image model in host memory, and on the GPU only "
        "while they work.",
    )
    served_image_model_name: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        IMAGES,
        "Names of the image model; replies contain the first. Default: the name of its folder, or "
        "small-flux for --images; without a language model --served-model-name counts too.",
        metavar="NAME…",
    )
    image_lora: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        IMAGES,
        "Adapters of the image model: name=source[@weight], with a .safetensors file or a folder "
        "as source. Give several after one flag, or repeat the flag.",
        metavar="NAME=SOURCE[@WEIGHT]…",
        limit=Limit("name=source[@weight] with distinct names", _are_loras),
    )
    image_default_lora: str | None = setting(
        None,
        Kind.TEXT,
        IMAGES,
        "The adapter of requests that name none. Default: the base draws.",
        metavar="NAME",
    )
    max_image_tokens: int = setting(
        MAX_IMAGE_TOKENS,
        Kind.COUNT,
        IMAGES,
        "Image tokens of one forward, over all its images; a larger image runs alone.",
        limit=at_least(1),
    )
    image_adapter_memory: int = setting(
        ADAPTER_MEMORY_BYTES,
        Kind.SIZE,
        IMAGES,
        "Memory of the device for the adapters of an image model, beside the model itself. "
        "Default: 2GiB.",
        metavar="SIZE",
        limit=at_least(1),
    )
    batching: str = setting(
        "mixed",
        Kind.TEXT,
        IMAGES,
        "Whether images with different adapters share a forward. Valid values: mixed, bucket (all "
        "images of a forward have the same adapters).",
        metavar="NAME",
        limit=one_of(*BATCHING),
    )

    def __post_init__(self) -> None:
        check_limits(self)


def demo_images(folder: Path = DEMO) -> tuple[str, tuple[str, ...]]:
    """Return the demo's model, and its adapters as --image-lora takes them."""
    model = folder / "model"
    if not (model / "model_index.json").exists():
        raise InvalidRequest(
            f"The demo's image model is not in {folder}, where the package or a checkout has it. "
            "Install loramux again, or name a model with --image-model.",
            param="image_model",
        )
    sources = sorted((folder / "adapters").iterdir())
    return str(model), tuple(f"{source.stem}={source}" for source in sources)


def with_demo(images: ImageConfig) -> ImageConfig:
    """Return the settings that --images stands for; other adapters are added to the demo's."""
    if not images.is_demo:
        return images
    if images.image_model is not None:
        raise InvalidRequest(
            "--images is the demo's model: leave it out, or --image-model.", param="images"
        )
    model, loras = demo_images()
    return replace(images, image_model=model, image_lora=(*loras, *images.image_lora))
