"""Many LoRA adapters on one base model, mixed in one batch.

docs/ARCHITECTURE.md describes the packages in the order in which a request passes them: cli,
launch, server, engine, scheduler, runner, models, lora, kernels, memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loramux.client.async_client import AsyncClient
    from loramux.client.client import Client
    from loramux.diffusion.image_pipeline import Drawing, ImagePipeline
    from loramux.engine.adapter_pool import AdapterPool
    from loramux.engine.llm import LLM
    from loramux.types.request import LoRARequest
    from loramux.types.sampling import SamplingParams

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AdapterPool",
    "AsyncClient",
    "Client",
    "Drawing",
    "ImagePipeline",
    "LoRARequest",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "loramux.engine.llm",
    "AdapterPool": "loramux.engine.adapter_pool",
    "Client": "loramux.client.client",
    "AsyncClient": "loramux.client.async_client",
    "Drawing": "loramux.diffusion.image_pipeline",
    "ImagePipeline": "loramux.diffusion.image_pipeline",
    "LoRARequest": "loramux.types.request",
    "SamplingParams": "loramux.types.sampling",
}


def __getattr__(name: str) -> object:
    """Import on first use, so that a light module such as loramux.types never loads torch."""
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            extra = "images" if "diffusion" in _HOMES[name] else "engine"
            raise ModuleNotFoundError(
                f"loramux.{name} needs {error.name}. Run: pip install 'loramux[{extra}]'",
                name=error.name,
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
