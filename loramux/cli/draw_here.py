"""Draws images in this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loramux.cli.console import counting
from loramux.cli.drawing import Asked, Drawn, load_image_model, selected
from loramux.config.images import demo_images, parse_image_lora, parse_size
from loramux.errors import InvalidRequest

MAX_SEED = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The model, its adapters, and the file of the images."""

    model: str | None
    """None: the demo's, with its adapters."""
    config: str | None = None
    """The configuration of a model that is a single file."""
    image_lora: list[str]
    out: Path
    each: bool = False
    """Whether the base and each adapter alone are drawn, in one batch."""
    enlarge: int = 1


def draw_here(asked: Asked, place: Place) -> Drawn:
    """Draws in one batch, and writes the images side by side into one file."""
    began = time.monotonic()
    loras = [parse_image_lora(text) for text in place.image_lora]
    weights = {lora.name: lora.weight for lora in loras}
    model = place.model
    if model is None:
        folder, demo = demo_images()
        model, loras = folder, [*map(parse_image_lora, demo), *loras]
    selections = _selections(asked, weights, [lora.name for lora in loras] if place.each else None)
    width, height = (None, None) if asked.size is None else parse_size(asked.size)
    seed = secrets.randbelow(MAX_SEED) if asked.seed is None else asked.seed
    pipeline = load_image_model(model, place.config)
    # Imported here, as in load_image_model.
    from loramux.diffusion.image_pipeline import Drawing, sheet

    for lora in loras:
        pipeline.add_adapter(lora.name, lora.source)
    loaded = time.monotonic()
    drawings = [
        Drawing(
            prompt=asked.prompt,
            negative_prompt=asked.negative_prompt,
            adapters=selection,
            width=width,
            height=height,
            steps=asked.steps,
            guidance_scale=asked.guidance_scale,
            seed=seed,
        )
        for selection in selections
    ]
    with counting("Steps") as show:
        drawn = pipeline.draw(drawings, on_progress=lambda _, done, total: show(done, total))
    sheet(drawn, place.enlarge).save(place.out)
    return Drawn(
        size=f"{drawn[0].request.width}x{drawn[0].request.height}",
        seed=str(seed),
        digests=[(_terms(one.drawing.adapters), one.digest) for one in drawn],
        seconds=f"{time.monotonic() - loaded:.1f}, and {loaded - began:.1f} to load the model",
        warnings=drawn[0].warnings,
    )


def _selections(
    asked: Asked, weights: dict[str, float], each: list[str] | None
) -> list[dict[str, float]]:
    """Return the adapters of each image; `each`: names of those that draw alone."""
    if each is not None:
        if asked.adapters is not None:
            raise InvalidRequest("--each draws with every adapter: leave out --adapter.")
        return [{}, *({name: weights.get(name, 1.0)} for name in each)]
    return [weights if asked.adapters is None else selected(asked.adapters, weights)]


def _terms(adapters: Mapping[str, float]) -> str:
    return " ".join(f"{name}:{weight:g}" for name, weight in adapters.items())
