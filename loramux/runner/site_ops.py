"""A decoder's products and what stands behind each: without LoRA, from lists, or from the tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from loramux.kernels.fused_torch import KVTarget, Norm, Rotation
from loramux.lora.tail_work import TailStep
from loramux.models.layers import Linear
from loramux.models.tail_linear import TailLinear
from loramux.runner.products import Products

QKV, OUT, GATE_UP, DOWN = range(4)

Place = tuple[int, int]
"""(layer, site)"""


class LoraStep(Protocol):
    """A step's adapters: what they add to a site's output."""

    def covers(self, site: int) -> bool:
        """False: they add nothing there."""

    def shrink(self, x: Tensor, layer: int, site: int) -> None: ...

    def expand(self, y: Tensor, layer: int, site: int) -> None: ...


class SiteOps(Protocol):
    """What `linear` gives goes to the operation behind that site, and to no other."""

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor: ...

    def rotate_write(
        self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place
    ) -> Tensor: ...

    def activate_mul(self, y: Tensor, activation: str, place: Place) -> Tensor: ...

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainOps:
    fused: Any
    lora: LoraStep | None
    products: Products

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor:
        y = self.products.linear(x, linear.weight, linear.bias)
        if self.lora is not None and self.lora.covers(place[1]):
            # Behind the product, without which a shrink may start too early: see lora_triton.
            self.lora.shrink(x, *place)
            self.lora.expand(y, *place)
        return y

    def rotate_write(self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place) -> Tensor:
        del place
        q: Tensor = self.fused.rotate_write(y, rotation, target)
        return q

    def activate_mul(self, y: Tensor, activation: str, place: Place) -> Tensor:
        del place
        mixed: Tensor = self.fused.activate_mul(y, activation)
        return mixed

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor:
        del place
        normed: Tensor = self.fused.add_norm(y, residual, norm, after)
        return normed


@dataclass(frozen=True, slots=True)
class TailOps:
    """y has the tail's h behind its outputs, until an operation or an expand has used it."""

    fused: Any
    tail: Any
    """loramux.kernels.tail_triton, or its twin."""
    lora: TailStep
    products: Products

    def linear(self, linear: Linear, x: Tensor, place: Place) -> Tensor:
        if not self.lora.covers(place[1]):
            return self.products.linear(x, linear.weight, linear.bias)
        assert isinstance(linear, TailLinear), "a linear layer has no tail"
        y = self.products.linear(x, *linear.with_tail(self.lora.num_tail_rows(place[1])))
        if self._is_added_later(place[1]):
            return y
        self.tail.expand(y, self.lora.at(*place))
        return y[:, : linear.out_features]

    def rotate_write(self, y: Tensor, rotation: Rotation, target: KVTarget, place: Place) -> Tensor:
        q: Tensor
        if self._is_added_later(place[1]):
            q = self.tail.rotate_write(y, rotation, target, self.lora.at(*place))
        else:
            q = self.fused.rotate_write(y, rotation, target)
        return q

    def activate_mul(self, y: Tensor, activation: str, place: Place) -> Tensor:
        mixed: Tensor
        if self._is_added_later(place[1]):
            mixed = self.tail.activate_mul(y, activation, self.lora.at(*place))
        else:
            mixed = self.fused.activate_mul(y, activation)
        return mixed

    def add_norm(
        self, y: Tensor, residual: Tensor, norm: Norm, after: Norm | None, place: Place
    ) -> Tensor:
        normed: Tensor
        if self._is_added_later(place[1]):
            normed = self.tail.add_norm(y, residual, norm, after, self.lora.at(*place))
        else:
            normed = self.fused.add_norm(y, residual, norm, after)
        return normed

    def _is_added_later(self, site: int) -> bool:
        """By the operation behind the product."""
        return self.lora.covers(site) and (self.lora.launch.folds_norm or site in (QKV, GATE_UP))
