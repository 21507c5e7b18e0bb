"""`ImagePipeline`: draws many images with different adapters in one process, without a server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from torch import Tensor

from loramux.base.progress import SILENT, ByteSink
from loramux.config.fields import AUTO
from loramux.config.images import MAX_IMAGE_TOKENS, ImageConfig
from loramux.diffusion.digest import pipeline_digest, pixel_digest, to_bytes
from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.events import ImageEvent, ImageFacts
from loramux.diffusion.lora_files.reader import AdapterReport
from loramux.diffusion.options import PipelineFiles
from loramux.diffusion.pipeline import load_pipeline
from loramux.diffusion.planner import Batching, PlanLimits
from loramux.errors import AdapterNotFound, InvalidRequest, suggest
from loramux.models.locate import located_images
from loramux.runner.device_choice import choose_device
from loramux.types.composition import check_sum
from loramux.types.image import DEFAULT_STRENGTH, ImageRequest, SourceImage, nearest_shape
from loramux.types.image_files import measure

MAX_RANDOM_SEED = 2**32
OnProgress = Callable[[int, int, int], None]
"""Called with the index of the drawing, its finished steps and all its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One image to draw; what is None has the default of the model."""

    prompt: str
    negative_prompt: str = ""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """Name -> weight; empty: the base."""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    seed: int | None = None
    """None: a random one, which the image names."""
    sampler: str = ""
    max_sequence_length: int | None = None
    image: bytes | None = None
    """A file that the drawing begins with; its size is the default then."""
    mask: bytes | None = None
    """A file that is white where the image is drawn anew; None: everywhere."""
    strength: float = DEFAULT_STRENGTH
    """The part of the steps that change the image."""

    @property
    def source(self) -> SourceImage | None:
        if self.image is None:
            if self.mask is not None:
                raise InvalidRequest("A mask needs an image.", param="mask")
            return None
        return SourceImage(image=self.image, mask=self.mask, strength=self.strength)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnImage:
    """An image with what it takes to draw it again."""

    drawing: Drawing
    request: ImageRequest
    pixels: Tensor
    """[height, width, 3] in [0, 1]"""
    facts: ImageFacts

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """[height, width, 3] bytes."""
        return to_bytes(self.pixels).numpy()

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.array)

    @property
    def digest(self) -> str:
        """The digest of the pixels as bytes, which is that of a receipt."""
        return pixel_digest(to_bytes(self.pixels))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the model could not draw of the prompt."""
        return self.facts.warnings

    def save(self, path: str | Path) -> None:
        self.image.save(path)


class ImagePipeline:
    """An image model with adapters by name."""

    def __init__(  # noqa: PLR0913  (settings with defaults)
        self,
        model: str | Path,
        *,
        dtype: str = AUTO,
        device: str = AUTO,
        max_image_tokens: int = MAX_IMAGE_TOKENS,
        batching: Batching = "mixed",
        config: str | Path | None = None,
        variant: str | None = None,
        downloads: ByteSink = SILENT,
    ) -> None:
        """Load a folder that diffusers saved, org/name[@revision] of the hub, or a single file.

        `device`: auto, cpu, cuda or cuda:N; `config`: of a single file, the folder or the
        repository with its configuration; `variant`: that of the weights, such as fp16.
        """
        images = ImageConfig(
            image_model=str(model),
            image_config=None if config is None else str(config),
            image_variant=variant,
        )
        images = located_images(images, sink=downloads)
        assert images.image_model is not None
        pipe = load_pipeline(
            Path(images.image_model),
            dtype=dtype,
            device=choose_device(device).device,
            files=PipelineFiles(config=images.image_config, variant=variant),
        )
        self._open(pipe, PlanLimits(max_tokens=max_image_tokens, batching=batching))

    @classmethod
    def from_diffusers(cls, pipe: Any, *, batching: Batching = "mixed") -> Self:
        """Draws with a pipeline that is loaded already, and changes no weight of it."""
        made = cls.__new__(cls)
        made._open(pipe, PlanLimits(batching=batching))
        return made

    def _open(self, pipe: Any, limits: PlanLimits) -> None:
        self._pipe = pipe
        self.engine = ImageEngine(pipe, limits)
        self._adapters: dict[str, AdapterReport] = {}

    @property
    def adapters(self) -> Mapping[str, AdapterReport]:
        """The adapters by name."""
        return self._adapters

    @cached_property
    def digest(self) -> str:
        """The digest of the base's weights."""
        return pipeline_digest(self._pipe)

    def add_adapter(self, name: str, path: str | Path) -> AdapterReport:
        """Read and check a file or a folder; raise AdapterRefused."""
        if not name:
            raise InvalidRequest("The name of an adapter must not be empty.", param="name")
        if name in self._adapters:
            raise InvalidRequest(f"An adapter is named {name!r} already.", param="name")
        found = self.engine.memory.catalog.identify(Path(path))
        assert found.report is not None
        self.engine.admit(found)
        self._adapters[name] = found.report
        return found.report

    def remove_adapter(self, name: str) -> None:
        report = self._adapters.pop(self._known(name))
        if all(other.cid != report.cid for other in self._adapters.values()):
            self.engine.remove_adapter(report.cid)

    def draw(
        self,
        drawings: str | Drawing | Sequence[str | Drawing],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[DrawnImage]:
        """Draws all images together; raises the error of the first that fails."""
        given = [drawings] if isinstance(drawings, str | Drawing) else drawings
        wanted = [Drawing(prompt=one) if isinstance(one, str) else one for one in given]
        requests = [self._request(str(index), one) for index, one in enumerate(wanted)]
        events: dict[str, ImageEvent] = {}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work:
                for event in self.engine.step():
                    if event.error is not None:
                        raise event.error
                    if event.is_last:
                        events[event.request_id] = event
                    elif on_progress is not None:
                        on_progress(int(event.request_id), event.step, event.num_steps)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        return [
            self._drawn(drawing, request, events[request.request_id])
            for drawing, request in zip(wanted, requests, strict=True)
        ]

    def effects(self, name: str, *, steps: int = 3) -> list[float]:
        """Return how much an adapter changes each of a few predictions of the base."""
        family = self.engine.family
        side = family.default_size if family.facts.sizes else min(family.default_size, 256)
        side -= side % family.size_factor
        drawing = Drawing(
            prompt=", ".join(self._adapters[self._known(name)].trigger_words) or "a photograph",
            adapters={name: 1.0},
            width=max(side, family.size_factor),
            height=max(side, family.size_factor),
            steps=steps,
            seed=0,
        )
        return self.engine.effects(self._request("effects", drawing))

    def _request(self, request_id: str, drawing: Drawing) -> ImageRequest:
        family = self.engine.family
        parts = [
            (self._adapters[self._known(name)].cid, weight)
            for name, weight in drawing.adapters.items()
        ]
        source = drawing.source
        width = height = family.default_size
        if source is not None:
            width, height = self._size_of(source)
        return ImageRequest(
            request_id=request_id,
            prompt=drawing.prompt,
            negative_prompt=drawing.negative_prompt,
            source=source,
            width=drawing.width or width,
            height=drawing.height or height,
            steps=drawing.steps or family.default_steps,
            guidance_scale=drawing.guidance_scale,
            true_cfg_scale=drawing.true_cfg_scale,
            seed=secrets.randbelow(MAX_RANDOM_SEED) if drawing.seed is None else drawing.seed,
            sampler=drawing.sampler,
            max_sequence_length=drawing.max_sequence_length,
            selection=check_sum(parts),
        )

    def _size_of(self, source: SourceImage) -> tuple[int, int]:
        family, (width, height) = self.engine.family, measure(source.image, "image")
        if family.facts.sizes:
            return nearest_shape(family.facts.sizes, width, height)
        factor = family.size_factor
        return max(width // factor, 1) * factor, max(height // factor, 1) * factor

    def _known(self, name: str) -> str:
        if name not in self._adapters:
            hint = suggest(name, list(self._adapters)) if self._adapters else "There are none."
            raise AdapterNotFound(f"There is no adapter {name!r}. {hint}")
        return name

    def _drawn(self, drawing: Drawing, request: ImageRequest, event: ImageEvent) -> DrawnImage:
        assert event.pixels is not None and event.facts is not None
        return DrawnImage(drawing, request, event.pixels, event.facts)


def sheet(drawn: Sequence[DrawnImage], enlarge: int = 1) -> Image.Image:
    """Return images of one size side by side."""
    width, height = drawn[0].image.size
    whole = Image.new("RGB", (width * len(drawn), height))
    for index, one in enumerate(drawn):
        whole.paste(one.image, (index * width, 0))
    return whole.resize((whole.width * enlarge, height * enlarge), Image.Resampling.NEAREST)
