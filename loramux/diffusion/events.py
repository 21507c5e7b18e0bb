"""What the step loop says about its images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loramux.errors import LoramuxError


@dataclass(slots=True, kw_only=True)
class ImageFacts:
    """How one image was made."""

    arrived_s: float
    queue_s: float = 0.0
    """Until its first step began."""
    denoise_s: float = 0.0
    """From its first step to its last one, pauses included."""
    decode_s: float = 0.0
    num_steps: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
    """Image tokens of all rows and steps."""
    num_pauses: int = 0
    max_images: int = 0
    """The most images that shared a forward with it, itself included."""
    max_adapters: int = 0
    """The most distinct adapters in one of its forwards."""
    tier_found: str | None = None
    """The slowest tier of its adapters at its arrival; None for the base."""
    load_s: float = 0.0
    """Seconds of the longest load of its adapters, if they were not on the device."""
    queue_depth: int = 0
    """Images that waited or ran at its arrival."""
    warnings: tuple[str, ...] = ()
    """What the model could not draw of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvent:
    """A step of one image, or its end: with pixels, or with an error."""

    request_id: str
    step: int = 0
    num_steps: int = 0
    pixels: Tensor | None = None
    """[height, width, 3] in [0, 1]"""
    preview: Tensor | None = None
    """The image as the denoiser predicts it after this step."""
    error: LoramuxError | None = None
    facts: ImageFacts | None = None

    @property
    def is_last(self) -> bool:
        return self.pixels is not None or self.error is not None
