"""Makes the sampler of one image: samplers hold their position and history, so each has its own."""

from __future__ import annotations

import copy
from typing import Any

import diffusers

from loramux.errors import InvalidRequest, suggest

# Name in requests -> class of diffusers and changes of the pipeline's configuration.
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_2s": ("DPMSolverSinglestepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}


class SamplerFactory:
    """Makes copies of a pipeline's own sampler, and of others with its configuration."""

    def __init__(self, scheduler: Any) -> None:
        self._own = scheduler
        self._made: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; flow matching has the pipeline's own alone."""
        return () if type(self._own).__name__.startswith("FlowMatch") else tuple(SAMPLERS)

    def check(self, name: str) -> None:
        if not name or name in self.names:
            return
        fix = suggest(name, self.names) if self.names else "Leave it out for the model's own."
        raise InvalidRequest(f"This model has no sampler {name!r}. {fix}", param="sampler")

    def make(self, name: str) -> Any:
        self.check(name)
        if not name:
            return copy.deepcopy(self._own)
        if name not in self._made:
            kind, changes = SAMPLERS[name]
            self._made[name] = getattr(diffusers, kind).from_config(self._own.config, **changes)
        return copy.deepcopy(self._made[name])
