"""The objects that the routes of an image model share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loramux.backend.images import ImageBackend
from loramux.metrics.images import ImageMetrics
from loramux.server.context import HostContext
from loramux.server.images.names import ImageNames
from loramux.server.naming.sources import AdapterSources
from loramux.types.modality import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContext(HostContext):
    """Shared by all routes for images."""

    modality: ClassVar[Modality] = "image"
    backend: ImageBackend
    names: ImageNames
    metrics: ImageMetrics

    @property
    def given_base_names(self) -> tuple[str, ...]:
        return self.names.base_names

    @property
    def max_body_bytes(self) -> int:
        return self.options.max_body_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """An image model and the names of its adapters."""

    backend: ImageBackend
    names: ImageNames
    sources: AdapterSources | None = None
    """Fetches adapters that requests load by their source; None: none is fetched."""
