"""What an image begins with: noise alone, or a source image with noise added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The part of the source image that inpainting keeps; its tensors have the latents' shape."""

    latents: Tensor
    noise: Tensor
    mask: Tensor
    """1 where the image is drawn anew."""

    def restored(self, latents: Tensor, scheduler: Any, timestep: Tensor | None) -> Tensor:
        """Return the latents with the kept part of the source.

        It gets the noise of the next timestep; None: it gets none, after the last step.
        """
        source = self.latents
        if timestep is not None:
            source = add_noise(scheduler, source, self.noise, timestep[None])
        return (1 - self.mask) * source + self.mask * latents


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    latents: Tensor
    timesteps: Tensor
    first: int = 0
    """The place of the first timestep among those of the sampler."""
    kept: Kept | None = None


def add_noise(scheduler: Any, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    if hasattr(scheduler, "scale_noise"):
        mixed: Tensor = scheduler.scale_noise(clean, timestep, noise)
    else:
        mixed = scheduler.add_noise(clean, noise, timestep)
    return mixed
