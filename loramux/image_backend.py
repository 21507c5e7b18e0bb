"""The interface between the server and an image engine. It imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from loramux.backend import Health
from loramux.types.image import ImageRequest

ImageFormat = Literal["png", "jpeg", "webp"]
FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCard:
    """Describes the image model of a running engine."""

    name: str
    path: str
    digest: str
    """The digest of its weights."""
    family: str
    dtype: str
    device: str
    default_size: int
    size_factor: int
    """Width and height are multiples of this."""
    default_steps: int
    max_tokens: int
    """Image tokens of one forward."""
    takes_guidance: bool
    """Whether requests may set guidance_scale; otherwise they set true_cfg_scale."""
    samplers: tuple[str, ...] = ()
    """Samplers beside the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAdapterCard:
    """A registered adapter of the image model."""

    cid: str
    path: str
    rank: int
    num_bytes: int
    num_modules: Mapping[str, int]
    """By component of the pipeline."""
    trigger_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """How images are encoded."""

    format: ImageFormat = "png"
    compression: int = 100
    """Quality of JPEG and WebP, 0 to 100."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUpdate:
    """A finished step, a partial image or the finished image."""

    step: int = 0
    num_steps: int = 0
    partial: bytes | None = None
    """The image as the denoiser predicts it now, encoded like the finished one."""
    finished: FinishedImage | None = None


class ImageBackend(Protocol):
    """An engine with one image model and its adapters by CID."""

    @property
    def health(self) -> Health: ...

    @property
    def card(self) -> ImageCard: ...

    @property
    def adapters(self) -> Mapping[str, ImageAdapterCard]:
        """Registered adapters by CID."""
        ...

    async def start(self) -> None:
        """Returns once requests are accepted; raises the error that prevents the start."""
        ...

    async def add_adapter(self, path: str) -> ImageAdapterCard:
        """Reads and checks a file or folder and registers it; raises AdapterRefused."""
        ...

    async def remove_adapter(self, cid: str) -> None:
        """Frees the adapter once no image uses it; raises AdapterNotFound."""
        ...

    def submit(self, request: ImageRequest, form: ImageForm) -> AsyncIterator[ImageUpdate]:
        """Yields an update after each step, and the finished image last.

        Closing the iterator early ends the image before the next step. Raises InvalidRequest,
        AdapterNotFound, EngineBusy, EngineStopped, or the error of the image.
        """
        ...

    async def close(self, *, drain_s: float) -> None:
        """Refuses new requests, waits up to drain_s for running ones, then stops the engine."""
        ...
