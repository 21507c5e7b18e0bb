"""The interface between the server and an image engine. It imports no torch."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loramux.backend.host import AdapterHost, EngineStats, HostCard
from loramux.types.adapter import AdapterCard
from loramux.types.image import MIN_SIDE, ImageRequest, nearest_shape

ImageFormat = Literal["png", "jpeg", "webp"]
FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCard(HostCard):
    """Describes an image model."""

    family: str
    default_size: int
    size_factor: int
    """Width and height are multiples of this."""
    default_steps: int
    max_tokens: int
    """Image tokens of one forward."""
    takes_guidance: bool
    """Whether requests may set guidance_scale; otherwise they set true_cfg_scale."""
    takes_true_cfg: bool = False
    """Whether classifier-free guidance is true_cfg_scale; otherwise it is guidance_scale."""
    samplers: tuple[str, ...] = ()
    """Samplers beside the model's own."""
    weighs_words: bool = False
    """Whether brackets in prompts may weigh words."""
    sizes: tuple[tuple[int, int], ...] = ()
    """All (width, height) that the model draws; empty: any."""

    @property
    def smallest_size(self) -> tuple[int, int]:
        if self.sizes:
            return min(self.sizes, key=math.prod)
        side = -(-MIN_SIDE // self.size_factor) * self.size_factor
        return side, side

    def size_like(self, width: int, height: int) -> tuple[int, int]:
        """Return the size for a source image, scaled down to the pixels of the default size.

        Sides are rounded down to what the model can draw.
        """
        if self.sizes:
            return nearest_shape(self.sizes, width, height)
        scale = min(1.0, self.default_size / (width * height) ** 0.5)
        factor, (least, _) = self.size_factor, self.smallest_size
        return (
            max(int(width * scale) // factor * factor, least),
            max(int(height * scale) // factor * factor, least),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAdapterCard(AdapterCard):
    """A registered adapter of the image model; `num_bytes` is its size on the device."""

    num_modules: Mapping[str, int]
    """By component of the pipeline."""
    file_bytes: int = 0
    formats: tuple[str, ...] = ()
    """How the file names its modules, most used first."""
    method: str = ""
    trigger_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """How images are encoded."""

    format: ImageFormat = "png"
    compression: int = 100
    """Quality of JPEG and WebP, 0 to 100."""
    texts: tuple[tuple[str, str], ...] = ()
    """Keys and texts that a finished PNG carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedImage:
    """An encoded image, and how it was made."""

    data: bytes
    digest: str
    """The digest of its pixels, which does not depend on the encoding."""
    num_steps: int
    prompt_tokens: int
    image_tokens: int
    """Image tokens of all rows and steps."""
    queue_s: float
    denoise_s: float
    decode_s: float
    num_pauses: int
    max_images: int
    """The most images in one of its forwards, itself included."""
    max_adapters: int
    tier_found: str | None = None
    """The slowest tier of its adapters at its arrival; None for the base."""
    load_s: float = 0.0
    """Seconds of the longest load of its adapters, if they were not on the device."""
    queue_depth: int = 0
    """Images that waited or ran at its arrival."""
    warnings: tuple[str, ...] = ()
    """What the model could not draw of the prompt."""

    @property
    def is_cold_miss(self) -> bool:
        return self.tier_found not in (None, "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUpdate:
    """A finished step, a partial image or the finished image."""

    step: int = 0
    num_steps: int = 0
    partial: bytes | None = None
    """The image as the denoiser predicts it now, encoded like the finished one."""
    finished: FinishedImage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStats(EngineStats):
    """A snapshot of an image engine."""

    num_paused: int = 0
    """Images that have begun and did not take part in the last forward."""
    rows_per_forward: Mapping[int, int] = field(default_factory=dict)
    """Number of rows -> number of forwards of the denoiser with so many."""
    adapters_per_forward: Mapping[int, int] = field(default_factory=dict)
    """Number of distinct adapters -> number of forwards of the denoiser with so many."""


class ImageBackend(AdapterHost, Protocol):
    """An adapter host that draws images."""

    @property
    def card(self) -> ImageCard: ...

    @property
    def stats(self) -> ImageStats: ...

    @property
    def adapters(self) -> Mapping[str, ImageAdapterCard]: ...

    async def add_adapter(self, path: str) -> ImageAdapterCard:
        """Read and check a file or folder and register it.

        Raises AdapterRefused, or DoesNotFit if the adapter is larger than the memory for adapters.
        """
        ...

    def submit(self, request: ImageRequest, form: ImageForm) -> AsyncIterator[ImageUpdate]:
        """Yield an update after each step, and the finished image last.

        Closing the iterator early ends the image before the next step. Raises InvalidRequest,
        AdapterNotFound, AdapterRefused (it cannot be loaded), DoesNotFit, EngineBusy, EngineStopped
        (the engine died), or the error of the image.
        """
        ...
