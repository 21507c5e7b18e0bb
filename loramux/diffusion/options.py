"""The settings of an image engine, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from loramux.config.engine import EvictionName
from loramux.config.fields import AUTO
from loramux.config.images import ADAPTER_MEMORY_BYTES
from loramux.diffusion.planner import PlanLimits

MAX_OPEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFiles:
    """Which files of a pipeline are read, and where its components are kept."""

    config: str | None = None
    """For a model of a single file: the folder of its configuration."""
    variant: str | None = None
    """None: the plain files, else the only variant."""
    is_offloaded: bool = False
    """Whether text encoders and VAE are on a GPU only while they work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEngineOptions:
    model: Path
    served_name: str | None = None
    files: PipelineFiles = PipelineFiles()
    dtype: str = AUTO
    device: str = AUTO
    """auto, cpu, cuda or cuda:N"""
    limits: PlanLimits = PlanLimits()
    max_open: int = MAX_OPEN
    """Images that run or wait; more are refused."""
    adapter_memory_bytes: int = ADAPTER_MEMORY_BYTES
    """Memory of the device for adapters; one that is larger is refused."""
    host_memory_bytes: int | str = AUTO
    """Host memory for packed adapters; auto: a quarter of what is free with a GPU, else 1 GiB."""
    disk_folder: Path | None = None
    """Folder of packed adapters on disk; None: they are read from their files again."""
    disk_space_bytes: int = 0
    eviction: EvictionName = "cost"

    def to_wire(self) -> dict[str, Any]:
        folder = None if self.disk_folder is None else str(self.disk_folder)
        return asdict(self) | {"model": str(self.model), "disk_folder": folder}

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> Self:
        folder = fields["disk_folder"]
        return cls(
            **fields
            | {
                "model": Path(fields["model"]),
                "files": PipelineFiles(**fields["files"]),
                "limits": PlanLimits(**fields["limits"]),
                "disk_folder": None if folder is None else Path(folder),
            }
        )
