"""sheaf's way to write down an image deployment: `ModelSpec`, `LoRAConfig`, `LoRAAdapter`.

A spec of sheaf runs unchanged if its imports name this module:

    from loramux.specs import LoRAAdapter, LoRAConfig, ModelServer, ModelSpec, ModelType
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from loramux.config.images import ImageConfig
from loramux.config.serve import ServeConfig
from loramux.errors import InvalidRequest
from loramux.progress import SILENT

BACKENDS = ("flux", "sdxl", "diffusion")


class ModelType(StrEnum):
    """The kinds of models of sheaf; images are served here."""

    DIFFUSION = "diffusion"


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter of a deployment: its source, and the weight of requests that name none."""

    source: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidRequest("The source of an adapter must not be empty.", param="source")
        if not 0 <= self.weight < math.inf:
            raise InvalidRequest("The weight of an adapter must be 0 or more.", param="weight")


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The adapters of a deployment by name, and the one of requests that name none."""

    adapters: Mapping[str, LoRAAdapter] = field(default_factory=dict)
    default: str | None = None

    def __post_init__(self) -> None:
        if self.default is not None and self.default not in self.adapters:
            raise InvalidRequest(
                f"LoRAConfig.default={self.default!r} is not in adapters "
                f"(known: {sorted(self.adapters)})",
                param="default",
            )


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Limits of a batch; images are batched step by step, so that only `bucket_by` is checked."""

    max_batch_size: int = 32
    timeout_ms: int = 50
    bucket_by: str | None = None


@dataclass(frozen=True, slots=True)
class ResourceConfig:
    """The machine of a deployment; one process on this machine is started."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_gb: float | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One image model with its adapters."""

    name: str
    model_type: ModelType | str
    backend: str
    backend_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora: LoRAConfig | None = None
    batch_policy: BatchPolicy = BatchPolicy()
    resources: ResourceConfig = ResourceConfig()

    def __post_init__(self) -> None:
        if self.model_type != ModelType.DIFFUSION:
            raise InvalidRequest(
                f"Models of the type {self.model_type} are not served; diffusion is.",
                param="model_type",
            )
        if self.backend not in BACKENDS:
            raise InvalidRequest(
                f"The backend {self.backend!r} is not one of {', '.join(BACKENDS)}.",
                param="backend",
            )
        if self.lora is not None and self.batch_policy.bucket_by is not None:
            raise InvalidRequest(
                "ModelSpec.lora and BatchPolicy.bucket_by are mutually exclusive: images are "
                "batched with their adapters. Pick one.",
                param="batch_policy",
            )

    @property
    def config(self) -> ServeConfig:
        """The settings of `loramux serve` that mean this deployment."""
        model = self.backend_kwargs.get("model_id")
        if not isinstance(model, str) or not Path(model).is_dir():
            raise InvalidRequest(
                f"backend_kwargs.model_id must be a folder that diffusers saved, got {model!r}.",
                param="backend_kwargs",
            )
        adapters = {} if self.lora is None else self.lora.adapters
        return ServeConfig(
            served_model_name=(self.name,),
            images=ImageConfig(
                image_model=model,
                image_lora=tuple(
                    f"{name}={one.source}@{one.weight}" for name, one in adapters.items()
                ),
                image_default_lora=None if self.lora is None else self.lora.default,
            ),
        )


class ModelServer:
    """Serves the model of a spec over HTTP."""

    def __init__(self, models: Sequence[ModelSpec], **settings: Any) -> None:
        """`settings`: more fields of ServeConfig, such as `port`."""
        if len(models) != 1:
            raise InvalidRequest(f"One server has one image model, got {len(models)} specs.")
        self._spec = models[0]
        self._settings = settings

    def run(self) -> int:
        """Serve until SIGTERM or Ctrl-C; returns the exit status."""
        from loramux.launch import serve

        config = replace(self._spec.config, **self._settings)
        return serve(
            config, progress=lambda *_: None, downloads=SILENT, on_ready=lambda ready: None
        )
