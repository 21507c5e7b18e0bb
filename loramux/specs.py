"""sheaf's way to write down a deployment; a spec of sheaf runs if its imports name this module."""

from loramux.launch.specs import (
    MODEL_ID,
    BatchPolicy,
    FleetConfig,
    LoRAAdapter,
    LoRAConfig,
    ModelServer,
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
