"""A LoRA adapter of an image model as pairs of matrices by component and module path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One module's delta, B @ A; the scale is part of B. DoRA then scales the rows of the sum."""

    a: Tensor
    """[rank, in] of a linear layer, [rank, in, height, width] of a convolution."""
    b: Tensor
    """[out, rank]"""
    dora: Tensor | None = None
    """[3, out], see `dora_rows`; None: the sum of weight and delta is used as it is."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.a.itemsize

    @property
    def num_elements(self) -> int:
        dora = 0 if self.dora is None else self.dora.numel()
        return self.a.numel() + self.b.numel() + dora

    def delta(self) -> Tensor:
        """Returns the change of the weight, in its shape."""
        return (self.b @ self.a.flatten(1)).view(self.b.shape[0], *self.a.shape[1:])

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        dora = None if self.dora is None else self.dora.to(device, dtype)
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype), dora)


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
    def is_dora(self) -> bool:
        """Whether any module is DoRA: then a sum with other adapters is not defined."""
        modules = (pair for named in self.components.values() for pair in named.values())
        return any(pair.dora is not None for pair in modules)

    @property
    def num_modules(self) -> int:
        return sum(map(len, self.components.values()))

    @property
    def num_bytes(self) -> int:
        return sum(
            pair.num_bytes for modules in self.components.values() for pair in modules.values()
        )
