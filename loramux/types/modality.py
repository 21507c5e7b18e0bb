"""What a base model generates."""

from __future__ import annotations

from typing import Literal

Modality = Literal["text", "image"]

NO_MODEL: dict[Modality, str] = {
    "text": "This server has no text model: start it with --model.",
    "image": "This server has no image model: start it with --image-model.",
}
