"""Finds the family of a pipeline."""

from __future__ import annotations

from typing import Any

from loramux.diffusion.families.base import Family
from loramux.diffusion.families.flux import Flux
from loramux.diffusion.families.flux2 import Flux2Klein
from loramux.diffusion.families.qwen_image import QwenImage
from loramux.diffusion.families.sd3 import StableDiffusion3
from loramux.diffusion.families.sdxl import Sdxl
from loramux.diffusion.families.wan import Wan
from loramux.diffusion.families.z_image import ZImage
from loramux.errors import UnsupportedModel

FAMILIES: tuple[type[Family], ...] = (
    Sdxl,
    Flux,
    StableDiffusion3,
    QwenImage,
    ZImage,
    Flux2Klein,
    Wan,
)


def find_family(name: str) -> type[Family]:
    """Return the family of a pipeline's class; raise UnsupportedModel."""
    for family in FAMILIES:
        if family.pipeline_class == name:
            return family
    served = ", ".join(family.pipeline_class for family in FAMILIES)
    raise UnsupportedModel(f"Pipelines of the class {name} are not served. Served are: {served}.")


def family_of(pipe: Any) -> Family:
    return find_family(type(pipe).__name__)(pipe)
