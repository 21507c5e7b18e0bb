"""sheaf's names: a script of sheaf runs if its imports name this module."""

from loramux.deploy.model_server import ModelServer
from loramux.launch.specs import (
    MODEL_ID,
    BatchPolicy,
    FleetConfig,
    LoRAAdapter,
    LoRAConfig,
    ModelSpec,
    ModelType,
    ResourceConfig,
    ScalingConfig,
)

__all__ = [
    "MODEL_ID",
    "BatchPolicy",
    "FleetConfig",
    "LoRAAdapter",
    "LoRAConfig",
    "ModelServer",
    "ModelSpec",
    "ModelType",
    "ResourceConfig",
    "ScalingConfig",
]
