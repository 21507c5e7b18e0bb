"""A LoRA adapter of an image model as pairs of matrices by component and module path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One module's delta, B @ A; the scale is part of B."""

    a: Tensor
    """[rank, in] of a linear layer, [rank, in, height, width] of a convolution."""
    b: Tensor
    """[out, rank]"""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def delta(self) -> Tensor:
        """Returns the change of the weight, in its shape."""
        return (self.b @ self.a.flatten(1)).view(self.b.shape[0], *self.a.shape[1:])

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype))


Modules = Mapping[str, LowRank]
"""Module path -> its delta."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageAdapter:
    """A checked adapter of one image model."""

    cid: str
    components: Mapping[str, Modules]
    """Component of the pipeline, such as `unet` -> the modules that change there."""

    @property
    def rank(self) -> int:
        return max(pair.rank for modules in self.components.values() for pair in modules.values())

    @property
    def num_modules(self) -> int:
        return sum(map(len, self.components.values()))

    @property
    def num_bytes(self) -> int:
        return sum(
            pair.num_bytes for modules in self.components.values() for pair in modules.values()
        )
