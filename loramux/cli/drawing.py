"""What `loramux draw` asks for and shows, wherever the images are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.errors import InvalidRequest

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


def split_weight(text: str) -> tuple[str, float | None]:
    """Reads NAME[:WEIGHT]; a name may have colons itself."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, None
    try:
        return name, float(weight)
    except ValueError:
        return text, None


def selected(adapters: list[str], weights: dict[str, float]) -> dict[str, float]:
    """Returns the weights by name: those given, else those of `weights`, else 1."""
    chosen: dict[str, float] = {}
    for text in adapters:
        name, weight = split_weight(text)
        if name in chosen:
            raise InvalidRequest(f"--adapter names {name} twice.")
        chosen[name] = weights.get(name, 1.0) if weight is None else weight
    return chosen
