"""An adapter of an image model: the changes of modules by component and module path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.diffusion.targets import Target


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One module's delta, B @ A; the scale is part of B. DoRA then scales the rows of the sum."""

    a: Tensor
    """[rank, in] of a linear layer, [rank, in, height, width] of a convolution."""
    b: Tensor
    """[out, rank]; the rank is 0 if the bias alone changes."""
    dora: Tensor | None = None
    """[3, out], see `dora_rows`; None: the sum of weight and delta is used as it is."""
    bias: Tensor | None = None
    """[out]: the delta of the bias."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_elements(self) -> int:
        return _count(self.a, self.b, self.dora, self.bias)

    def delta(self) -> Tensor:
        """Return the change of the weight, in its shape."""
        return (self.b @ self.a.flatten(1)).view(self.b.shape[0], *self.a.shape[1:])

    def outputs(self, module: Target, x: Tensor) -> Tensor:
        """Return what the change of the weight adds to the module's outputs for inputs x."""
        if isinstance(module, nn.Conv2d):
            h = F.conv2d(x, self.a, None, module.stride, module.padding, module.dilation)
            return F.conv2d(h, self.b[:, :, None, None])
        return F.linear(F.linear(x, self.a), self.b)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        dora = None if self.dora is None else self.dora.to(device, dtype)
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype), dora, bias)

    def on(self, device: torch.device) -> LowRank:
        """Return it on a device; itself if it is there."""
        return self if self.a.device == device else self.to(device, self.a.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Kronecker:
    """One module's delta: rows of the Kronecker product of two matrices (LoKr)."""

    left: Tensor
    """[out 1, in 1], with the scale."""
    right: Tensor
    """[out 2, in 2] of a linear layer, [out 2, in 2, height, width] of a convolution."""
    num_rows: int
    skip: int = 0
    """The rows of the product that come before those of this module."""
    bias: Tensor | None = None

    @property
    def dora(self) -> None:
        return None

    @property
    def rank(self) -> int:
        """The largest rank that a product of these shapes has."""
        return min(self.left.shape) * min(self.right.flatten(1).shape)

    @property
    def num_elements(self) -> int:
        return _count(self.left, self.right, self.bias)

    def delta(self) -> Tensor:
        whole = torch.einsum("pq,rc...->prqc...", self.left, self.right)
        return self._own(whole.flatten(0, 1).flatten(1, 2), 0)

    def outputs(self, module: Target, x: Tensor) -> Tensor:
        """Return what the change of the weight adds to the module's outputs for inputs x.

        As two small products; the Kronecker product itself is never made.
        """
        columns = self.left.shape[1]
        if isinstance(module, nn.Conv2d):
            h = x.reshape(len(x) * columns, -1, *x.shape[2:])
            h = F.conv2d(h, self.right, None, module.stride, module.padding, module.dilation)
            h = torch.einsum("pq,nqrhw->nprhw", self.left, h.view(len(x), columns, *h.shape[1:]))
            return self._own(h.flatten(1, 2), 1)
        h = F.linear(x.reshape(*x.shape[:-1], columns, -1), self.right)
        return self._own((self.left @ h).flatten(-2), -1)

    def to(self, device: torch.device, dtype: torch.dtype) -> Kronecker:
        bias = None if self.bias is None else self.bias.to(device, dtype)
        factors = self.left.to(device, dtype), self.right.to(device, dtype)
        return Kronecker(*factors, self.num_rows, self.skip, bias)

    def on(self, device: torch.device) -> Kronecker:
        """Return it on a device; itself if it is there."""
        return self if self.left.device == device else self.to(device, self.left.dtype)

    def _own(self, rows: Tensor, dim: int) -> Tensor:
        return rows.narrow(dim, self.skip, self.num_rows)


ModuleDelta = LowRank | Kronecker
Modules = Mapping[str, ModuleDelta]
"""Module path -> its delta."""


def _count(*parts: Tensor | None) -> int:
    return sum(part.numel() for part in parts if part is not None)


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
