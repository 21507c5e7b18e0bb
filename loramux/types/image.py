"""Requests for images, without torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import msgspec

from loramux.errors import InvalidRequest
from loramux.types.request import BASE_SELECTION, Selection

PIPELINE_CLASSES = (
    "StableDiffusionXLPipeline",
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "QwenImagePipeline",
    "ZImagePipeline",
    "Flux2KleinPipeline",
    "WanPipeline",
)
"""The pipelines of diffusers that are served."""
MIN_SIDE = 16
MAX_STEPS = 200
MAX_PARTIAL_IMAGES = 3
MAX_SEED = 2**63 - 1
MAX_GUIDANCE = 100.0
MAX_PIXELS = 2**24
"""Limit of one image that is drawn."""
DEFAULT_STRENGTH = 0.8
MAX_MASK_BLUR = 256.0
MaskedBy = Literal["white", "black", "transparency"]


class SourceImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a drawing begins with, and the part of it that may change.

    It is scaled to the size of the drawing.
    """

    image: bytes
    """A file: PNG, JPEG or WebP."""
    mask: bytes | None = None
    """A file that marks what is drawn anew (inpainting); None: all of it."""
    strength: float = DEFAULT_STRENGTH
    """The part of the steps that run, from more noise to less; 1: all of them."""
    masked_by: MaskedBy = "white"
    """How the mask marks pixels; `transparency` means white for a mask without an alpha channel."""
    mask_blur: float = 0.0
    """Deviation of a Gaussian blur of the mask, in pixels of its file."""

    def __post_init__(self) -> None:
        if not self.image:
            raise InvalidRequest("The image is empty.", param="image")
        if self.mask is not None and not self.mask:
            raise InvalidRequest("The mask is empty.", param="mask")
        if not 0 < self.strength <= 1:
            raise InvalidRequest(
                f"strength must be over 0 and at most 1, got {self.strength}.", param="strength"
            )
        if not 0 <= self.mask_blur <= MAX_MASK_BLUR:
            raise InvalidRequest(
                f"mask_blur must be in 0 to {MAX_MASK_BLUR:g}, got {self.mask_blur}.",
                param="mask_blur",
            )


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One image to draw, with resolved adapters; it does not change while it runs."""

    request_id: str
    prompt: str
    width: int
    height: int
    steps: int
    seed: int
    weighs_words: bool = False
    """Whether brackets in the prompts weigh their words, as in A1111."""
    negative_prompt: str = ""
    """What the image must not show; it takes part in classifier-free guidance only."""
    guidance_scale: float | None = None
    """None: the family's default."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of families whose `guidance_scale` is an input of the model."""
    sampler: str = ""
    """Empty: the sampler of the pipeline."""
    max_sequence_length: int | None = None
    """Length of the prompt in tokens; None: the family's default."""
    partial_images: int = 0
    """Previews on the way, at equal distances."""
    source: SourceImage | None = None
    """None: the drawing begins with noise alone."""
    selection: Selection = BASE_SELECTION
    tenant: str = ""
    tenant_share: float = 1.0
    adapter_share: float = 1.0
    """Shares under fair scheduling; they are unrelated to the weights of the selection."""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise InvalidRequest("The prompt must not be empty.", param="prompt")
        check_range("num_inference_steps", self.steps, 1, MAX_STEPS)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("partial_images", self.partial_images, 0, MAX_PARTIAL_IMAGES)
        check_range("width", self.width, MIN_SIDE)
        check_range("height", self.height, MIN_SIDE)
        if self.width * self.height > MAX_PIXELS:
            raise InvalidRequest(
                f"An image has at most {MAX_PIXELS} pixels, got {self.width}x{self.height}.",
                param="size",
            )
        for name in ("guidance_scale", "true_cfg_scale"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_GUIDANCE:
                raise InvalidRequest(
                    f"{name} must be in 0 to {MAX_GUIDANCE:g}, got {value:g}.", param=name
                )

    def has_preview_after(self, step: int, num_steps: int) -> bool:
        """Whether a preview is due after this step, which is not the last."""
        count = self.partial_images
        due = {num_steps * index // (count + 1) for index in range(1, count + 1)}
        return step in due and 0 < step < num_steps

    @property
    def cids(self) -> tuple[str, ...]:
        return tuple(cid for cid, _ in self.selection)


def nearest_shape(sizes: Collection[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Return the (width, height) among `sizes` whose aspect ratio is the nearest."""
    return min(sizes, key=lambda size: abs(math.log(size[0] * height / (size[1] * width))))


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"in {least} to {most}"
        raise InvalidRequest(f"{name} must be {limits}, got {value}.", param=name)
