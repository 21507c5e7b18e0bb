"""sheaf's way to write down a deployment: `ModelSpec`, `LoRAConfig`, `LoRAAdapter`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loramux.config.file import parse
from loramux.config.serve import SETTINGS, ServeConfig, serve_config
from loramux.errors import InvalidRequest, suggest
from loramux.types.limits import Limits, change_limits


class ModelType(StrEnum):
    """The kinds of models that are served; the first is sheaf's."""

    DIFFUSION = "diffusion"
    TEXT = "text"


BACKENDS = {ModelType.DIFFUSION: ("flux", "sdxl", "diffusion"), ModelType.TEXT: ("loramux",)}
MODEL_ID = "model_id"
_IMAGE_KWARGS = {
    "torch_dtype": "image_dtype",
    "dtype": "image_dtype",
    "device": "device",
    "enable_model_cpu_offload": "image_offload",
    "variant": "image_variant",
    "config": "image_config",
}
"""Keys of backend_kwargs for images -> the setting of `loramux serve` that they are."""
REVISION = "revision"
# Settings of `loramux serve` that a spec says in another way, or that each replica gets its own of.
_GIVEN_ELSEWHERE = {
    "model": "backend_kwargs.model_id",
    "image_model": "backend_kwargs.model_id",
    "lora_modules": "lora",
    "image_lora": "lora",
    "image_default_lora": "lora.default",
    "served_model_name": "name",
    "host": "fleet.engine_host",
    "port": "fleet.engine_port",
    "allow_runtime_lora_updating": "lora",
}


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter of a deployment: its source, and the weight of requests that name none."""

    source: str
    weight: float = 1.0
    pinned: bool = False
    """Whether it stays on the device; for text."""

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
    """What each replica of a deployment has, and how many there are where they do not scale."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_gb: float | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """The number of replicas by their load: waiting sequences and half of the running ones."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_load: float = 16.0
    """The load of one replica."""
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    """Long by default: a replica that stops takes its caches along."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidRequest(
                "scaling needs 1 <= min_replicas <= max_replicas, got "
                f"{self.min_replicas} and {self.max_replicas}.",
                param="scaling",
            )
        if not 0 < self.target_load < math.inf:
            raise InvalidRequest("scaling.target_load must be over 0.", param="scaling")
        if min(self.upscale_delay_s, self.downscale_delay_s) < 0:
            raise InvalidRequest("The delays of scaling must be 0 or more.", param="scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Replicas and the router in front of them."""

    front_host: str = "127.0.0.1"
    front_port: int = 8080
    """The router's own listener."""
    front_replicas: int = 1
    proxy_host: str = "127.0.0.1"
    proxy_port: int = 8000
    """Ray's proxy, which answers the same more slowly."""
    engine_host: str = "auto"
    """Where replicas listen; auto: the address of their node in Ray's cluster."""
    engine_port: int = 8100
    """Replicas of a node listen on this port and the following ones."""
    surge_percent: int = 100
    """How many more replicas a rolling update may start before it stops old ones; 0 where no
    GPU is spare."""
    prewarm: int = 32
    """Busy adapters of the fleet that a new replica may load before it takes requests."""
    runtime_loads: bool = False
    """Whether clients may load and unload adapters through the router."""
    start_s: float = 1800.0
    """How long a replica may take to start."""
    scaling: ScalingConfig | None = None

    def __post_init__(self) -> None:
        ports = ("front_port", "proxy_port", "engine_port")
        for name in ports:
            if not 1 <= getattr(self, name) <= 65535:
                raise InvalidRequest(f"fleet.{name} must be from 1 to 65535.", param=name)
        if len({getattr(self, name) for name in ports}) < len(ports):
            raise InvalidRequest(f"The ports {', '.join(ports)} must differ.", param="fleet")
        for name in ("front_replicas", "start_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"fleet.{name} must be over 0.", param=name)
        for name in ("surge_percent", "prewarm"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"fleet.{name} must be 0 or more.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model with its adapters."""

    name: str
    model_type: ModelType | str
    backend: str
    backend_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora: LoRAConfig | None = None
    batch_policy: BatchPolicy = BatchPolicy()
    resources: ResourceConfig = ResourceConfig()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More settings of `loramux serve`, as in its TOML file."""
    limits: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Limits of tenants by name, as `loramux tenants set` writes them to the registry."""
    fleet: FleetConfig = FleetConfig()

    def __post_init__(self) -> None:
        self._check_kind()
        if self.lora is not None and self.batch_policy.bucket_by is not None:
            raise InvalidRequest(
                "ModelSpec.lora and BatchPolicy.bucket_by are mutually exclusive: images are "
                "batched with their adapters. Pick one.",
                param="batch_policy",
            )
        if self.is_text:
            self._check_text()
        else:
            self._check_images()
        for name, value in self.settings.items():
            _check_setting(name, value)
        for limits in self.limits.values():
            change_limits(Limits(), limits)

    def _check_kind(self) -> None:
        if self.model_type not in tuple(ModelType):
            raise InvalidRequest(
                f"Models of the type {self.model_type} are not served; "
                f"{' and '.join(ModelType)} are.",
                param="model_type",
            )
        backends = BACKENDS[ModelType(self.model_type)]
        if self.backend not in backends:
            raise InvalidRequest(
                f"The backend {self.backend!r} is not one of {', '.join(backends)}.",
                param="backend",
            )

    def _check_text(self) -> None:
        for name in self.backend_kwargs:
            if name != MODEL_ID:
                raise InvalidRequest(
                    f"backend_kwargs has no {name!r} for text: write it to settings.",
                    param="backend_kwargs",
                )
        if self.lora is None:
            return
        if self.lora.default is not None:
            raise InvalidRequest(
                "LoRAConfig.default is for images; for text the model of a request is its adapter.",
                param="lora",
            )
        for name, adapter in self.lora.adapters.items():
            if adapter.weight != 1.0:
                raise InvalidRequest(
                    f"The weight of {name!r} is for images; for text a request has weights.",
                    param="lora",
                )

    def _check_images(self) -> None:
        known = (MODEL_ID, REVISION, *_IMAGE_KWARGS)
        for name in self.backend_kwargs:
            if name not in known:
                raise InvalidRequest(
                    f"backend_kwargs has an unknown key {name!r}. {suggest(name, known)}",
                    param="backend_kwargs",
                )
        for name, value in self._image_settings.items():
            parse(name, value, source=f"backend_kwargs: {name}")
            if name in self.settings:
                raise InvalidRequest(
                    f"settings and backend_kwargs both have {name!r}.", param="settings"
                )

    @property
    def _image_settings(self) -> dict[str, Any]:
        """The settings that backend_kwargs means, beside the model."""
        given = {
            _IMAGE_KWARGS[name]: value
            for name, value in self.backend_kwargs.items()
            if name in _IMAGE_KWARGS and value is not None
        }
        if "image_dtype" in given:
            # Also torch.bfloat16 itself, which needs no import of torch here.
            given["image_dtype"] = str(given["image_dtype"]).removeprefix("torch.")
        return given

    @property
    def is_text(self) -> bool:
        return self.model_type == ModelType.TEXT

    @property
    def serve_settings(self) -> dict[str, Any]:
        """What a replica's settings file has, beside adapters that can change while it runs."""
        model = self.backend_kwargs.get(MODEL_ID)
        if not (isinstance(model, str) and model) and not self.is_text:
            raise InvalidRequest(
                "backend_kwargs.model_id must be a folder that diffusers saved, or org/name on the "
                f"Hugging Face hub, got {model!r}.",
                param="backend_kwargs",
            )
        found: dict[str, Any] = {**self.settings, "served_model_name": [self.name]}
        if self.is_text:
            return found | ({} if model is None else {"model": model})
        lora = self.lora or LoRAConfig()
        revision = self.backend_kwargs.get(REVISION)
        found["image_model"] = model if revision is None else f"{model}@{revision}"
        found |= self._image_settings
        found["image_lora"] = [
            f"{name}={one.source}@{one.weight}" for name, one in lora.adapters.items()
        ]
        return found | ({} if lora.default is None else {"image_default_lora": lora.default})

    @property
    def config(self) -> ServeConfig:
        """The settings of `loramux serve` that mean this deployment on this machine."""
        settings = self.serve_settings
        if self.is_text:
            adapters = {} if self.lora is None else self.lora.adapters
            settings["lora_modules"] = {name: one.source for name, one in adapters.items()}
        return serve_config(
            {name: parse(name, value, source=name) for name, value in settings.items()}
        )


def _check_setting(name: str, value: object) -> None:
    if name in _GIVEN_ELSEWHERE:
        raise InvalidRequest(
            f"settings has {name!r}: write it to {_GIVEN_ELSEWHERE[name]}.", param="settings"
        )
    if name not in SETTINGS:
        raise InvalidRequest(
            f"settings has an unknown key {name!r}. {suggest(name, list(SETTINGS))}",
            param="settings",
        )
    parse(name, value, source=f"settings.{name}")
