"""A decoder's products and what stands behind each: without LoRA, from lists, or from the tail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loramux.kernels.ops import AugmentedLoraOps, ElementwiseOps, KVTarget, Norm, Rotation
from loramux.lora.augmented_step import AugmentedStep
from loramux.models.augmented_linear import AugmentedLinear
from loramux.models.layers import Linear
from loramux.runner.gemm.autotune import Follower
from loramux.runner.gemm.dispatch import Products

QKV, OUT, GATE_UP, DOWN = range(4)
# Behind these stands add_norm, which takes a product in parts as well.
_SITES_IN_PARTS = (OUT, DOWN)

Place = tuple[int, int]
"""(layer, site)"""


class LoraStep(Protocol):
    """A step's adapters: what they add to a site's output."""

    def covers(self, site: int) -> bool:
        """False: they add nothing there."""

    def shrink(self, x: Tensor, layer: int, site: int) -> None: ...

    def expand(self, y: Tensor, layer: int, site: int) -> None: ...

    def expand_swiglu(self, y: Tensor, activation: str, layer: int, site: int) -> Tensor:
        """Of gate and up, with the activation behind them."""


class SiteOps(Protocol):
    """What `linear` gives goes to the operation behind that site, and to no other.

    It may be a product in parts, where that operation can add them up.
    """

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor: ...

    def rotate_write(
        self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place
    ) -> Tensor: ...

    def gated(self, linear: Linear, x: Tensor, activation: str, place: Place) -> Tensor:
        """gate and up, with the activation behind them."""

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainOps:
    elementwise: ElementwiseOps
    lora: LoraStep | None
    products: Products

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor:
        if self.lora is None or not self.lora.covers(place[1]):
            return _product(self.products, x, place, linear.weight, linear.bias)
        y = self._shrunk(self.lora, linear, x, place)
        self.lora.expand(y, *place)
        return y

    def _shrunk(self, lora: LoraStep, linear: Linear, x: Tensor, place: Place) -> Tensor:
        """The product, and a shrink behind it: without one it may start too early."""
        y = self.products.linear(x, linear.weight, linear.bias)
        lora.shrink(x, *place)
        return y

    def rotate_write(self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place) -> Tensor:
        del place
        return self.elementwise.rotate_write(y, rotation, target)

    def gated(self, linear: Linear, x: Tensor, activation: str, place: Place) -> Tensor:
        if self.lora is not None and self.lora.covers(place[1]):
            y = self._shrunk(self.lora, linear, x, place)
            return self.lora.expand_swiglu(y, activation, *place)
        mixed: Tensor | None = self.products.gated(x, linear.weight, linear.bias)
        if mixed is None:
            mixed = self.elementwise.activate_mul(self.linear(linear, x, place), activation)
        return mixed

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor:
        del place
        return self.elementwise.add_norm(y, residual, norm, after)


@dataclass(frozen=True, slots=True)
class AugmentedOps:
    """y has the tail's h behind its outputs, until an operation or an expand has used it."""

    elementwise: ElementwiseOps
    augmented: AugmentedLoraOps
    lora: AugmentedStep
    products: Products

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor:
        if not self.lora.covers(place[1]):
            return _product(self.products, x, place, linear.weight, linear.bias)
        assert isinstance(linear, AugmentedLinear), "a linear layer has no tail"
        with_appended = linear.with_appended(self.lora.num_appended_rows(place[1]))
        y = _product(self.products, x, place, *with_appended)
        if self._is_added_later(place[1]):
            return y
        return self.augmented.expand(y, self.lora.at(*place))

    def rotate_write(self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place) -> Tensor:
        if self._is_added_later(place[1]):
            return self.augmented.rotate_write(y, rotation, target, self.lora.at(*place))
        return self.elementwise.rotate_write(y, rotation, target)

    def gated(self, linear: Linear, x: Tensor, activation: str, place: Place) -> Tensor:
        mixed: Tensor | None
        if self._is_added_later(place[1]):
            y = self.linear(linear, x, place)
            mixed = self.augmented.activate_mul(y, activation, self.lora.at(*place))
        else:
            mixed = self.products.gated(x, linear.weight, linear.bias)
        if mixed is None:
            mixed = self.elementwise.activate_mul(self.linear(linear, x, place), activation)
        return mixed

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor:
        if self._is_added_later(place[1]):
            return self.augmented.add_norm(y, residual, norm, after, self.lora.at(*place))
        return self.elementwise.add_norm(y, residual, norm, after)

    def _is_added_later(self, site: int) -> bool:
        """By the operation behind the product."""
        return self.lora.covers(site) and (self.lora.launch.fuses_norm or site in (QKV, GATE_UP))


def add_norm_behind(elementwise: ElementwiseOps, norm: Norm, dtype: torch.dtype) -> Follower:
    """What stands behind a product that may come in parts, for measurements."""
    size = len(norm.weight)

    def follow(y: Tensor) -> Callable[[], None]:
        residual = y.new_zeros(y.shape[-2], size, dtype=dtype)

        def run() -> None:
            # What a tail has is little beside it.
            elementwise.add_norm(y[..., :size], residual, norm)

        return run

    return follow


def _product(
    products: Products, x: Tensor, place: Place, weight: Tensor, bias: Tensor | None
) -> Tensor:
    if place[1] in _SITES_IN_PARTS:
        return products.parts(x, weight, bias)
    return products.linear(x, weight, bias)
