"""Messages between the server and the engine process of an image model."""

from __future__ import annotations

from typing import Any

from loramux.backend.images import (
    ImageAdapterCard,
    ImageCard,
    ImageForm,
    ImageStats,
    ImageUpdate,
)
from loramux.types.image import ImageRequest
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Examine,
    Failed,
    ListUses,
    Message,
    Pin,
    Prewarm,
    Progress,
    Ready,
    Refused,
    Register,
    RegisterMany,
    Remove,
    ResidencyUpdate,
    Shutdown,
    Verify,
)


class StartImages(Message):
    options: dict[str, Any]
    """See ImageEngineOptions.to_wire()."""


class Draw(Message):
    request: ImageRequest
    form: ImageForm


class Drawn(Message):
    """A step of an image, or its end, with pictures as encoded files."""

    request_id: str
    update: ImageUpdate


class Report(Message):
    """The statistics of the engine."""

    stats: ImageStats
    """`resident_adapters` is empty here: `residency` has the changes."""
    residency: ResidencyUpdate | None = None


Command = (
    StartImages
    | Draw
    | Abort
    | Register
    | RegisterMany
    | Adopt[ImageAdapterCard]
    | Verify
    | Examine
    | Remove
    | Pin
    | Prewarm
    | ListUses
    | Shutdown
)
Reply = Progress | Ready[ImageCard] | Failed | Drawn | Report | Refused | Answer[ImageAdapterCard]
