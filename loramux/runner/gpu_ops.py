"""Op sets of the decoder on a GPU: fused linears without LoRA, with SGMV or with augmented weights.

Kernels launch by PDL: each may start before its predecessor ends, so their order is part of the
contract of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from loramux.kernels.linear import DENSE, DenseWeight, LinearMethod, SplitsInputs
from loramux.kernels.ops import (
    AugmentedLoraOps,
    DeviceAttentionPlan,
    ElementwiseOps,
    KVTarget,
    Norm,
    Rotation,
)
from loramux.lora.augmented_step import AugmentedStep
from loramux.models.architectures import DecoderConfig, linears_of
from loramux.models.augmented_linear import AugmentedLinear
from loramux.models.decoder import Decoder
from loramux.models.forward import Attention
from loramux.models.layers import Rotary
from loramux.runner.gemm.dispatch import GemmDispatcher
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """A linear of a layer, and the coordinates that LoRA kernels know it by."""

    method: LinearMethod
    weight: DenseWeight | None
    """What GEMM kernels read; None if they do not know the format: the method computes then."""
    augmented: AugmentedLinear | None
    """None if no rows are appended to the weight."""
    layer: int
    index: int
    """Position of its spec among the linears of a layer."""
    block: str
    """Submodule of the layer: ATTENTION_BLOCK or MLP_BLOCK."""
    is_added: bool
    """Whether add_norm follows, which reduces the partial sums of a split-K GEMM."""
    fuses: bool
    """Whether the kernels of the op that follows the linear can add its LoRA."""

    @classmethod
    def of(
        cls, config: DecoderConfig, layer: int, spec: LinearSpec, method: LinearMethod
    ) -> GpuLinear:
        is_dense = method.gemm_key == DENSE
        return cls(
            method,
            DenseWeight(method.dequantised_rows(), method.bias) if is_dense else None,
            method if isinstance(method, AugmentedLinear) else None,
            layer,
            [one.name for one in linears_of(config)].index(spec.name),
            spec.block,
            spec.is_added,
            fuses_lora(config, spec),
        )


def fuses_lora(config: DecoderConfig, spec: LinearSpec) -> bool:
    """Return whether the kernels that follow a linear know its projections and norms.

    Kernels after a linear that is not added read B of each projection, the others end with a norm.
    """
    if spec.is_added:
        names = config.norm_names
        return names.attention is not None and names.mlp is not None
    return len(spec.projections) > 1 and (spec.is_gated or not config.has_wide_norm)


def multiply(
    gemms: GemmDispatcher,
    linear: GpuLinear,
    x: Tensor,
    *,
    weight: DenseWeight | None = None,
    splits: bool = False,
) -> Tensor:
    """Compute a linear without adapters.

    weight: in place of the linear's own, with rows behind it
    splits: may return partial sums where add_norm follows
    """
    weight = weight or linear.weight
    if weight is None:
        method = linear.method
        if splits and linear.is_added and isinstance(method, SplitsInputs):
            return method.partial_sums(x)
        return method(x)
    if splits and linear.is_added:
        return gemms.split_k(x, *weight)
    return gemms.linear(x, *weight)


def multiply_swiglu(gemms: GemmDispatcher, linear: GpuLinear, x: Tensor) -> Tensor | None:
    """Compute a gated linear and its activation in one kernel; None where there is none."""
    return None if linear.weight is None else gemms.linear_swiglu(x, *linear.weight)


class LoraStep(Protocol):
    """The adapters of a step on the segmented path."""

    def covers(self, site: int) -> bool:
        """Return whether the adapters change the fused linear of this index."""

    def shrink(self, x: Tensor, layer: int, site: int) -> None: ...

    def expand(self, y: Tensor, layer: int, site: int) -> None: ...

    def expand_swiglu(self, y: Tensor, activation: str, layer: int, site: int) -> Tensor:
        """Expand gate and up, and return activation(gate) * up."""


class FusedLinearOps(Protocol):
    """A fused linear with its adapters, and the op that follows it.

    The output of `linear` is input of the op that follows this linear and of no other: it may be
    the partial sums of a split-K GEMM, or have LoRA's h appended to it.
    """

    def linear(self, linear: GpuLinear, x: Tensor) -> Tensor: ...

    def rotate_write(
        self, linear: GpuLinear, y: Tensor, rotation: Rotation, target: KVTarget
    ) -> Tensor: ...

    def glu(self, linear: GpuLinear, x: Tensor, activation: str) -> Tensor:
        """Compute activation(gate) * up, where linear(x) is gate and up."""

    def add_norm(
        self, linear: GpuLinear, y: Tensor, residual: Tensor, norm: Norm | None, after: Norm | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SegmentedLinearOps:
    """Linears followed by SGMV shrink and expand kernels, or by none."""

    elementwise: ElementwiseOps
    lora: LoraStep | None
    gemms: GemmDispatcher

    def linear(self, linear: GpuLinear, x: Tensor) -> Tensor:
        if self.lora is None or not self.lora.covers(linear.index):
            return multiply(self.gemms, linear, x, splits=True)
        y = self._linear_shrink(self.lora, linear, x)
        self.lora.expand(y, linear.layer, linear.index)
        return y

    def _linear_shrink(self, lora: LoraStep, linear: GpuLinear, x: Tensor) -> Tensor:
        """GEMM, then shrink: the expand must not be the GEMM's PDL successor."""
        y = multiply(self.gemms, linear, x)
        lora.shrink(x, linear.layer, linear.index)
        return y

    def rotate_write(
        self, linear: GpuLinear, y: Tensor, rotation: Rotation, target: KVTarget
    ) -> Tensor:
        return self.elementwise.rotate_write(y, rotation, target)

    def glu(self, linear: GpuLinear, x: Tensor, activation: str) -> Tensor:
        if self.lora is not None and self.lora.covers(linear.index):
            y = self._linear_shrink(self.lora, linear, x)
            if not linear.fuses:
                self.lora.expand(y, linear.layer, linear.index)
                return self.elementwise.activate_mul(y, activation)
            return self.lora.expand_swiglu(y, activation, linear.layer, linear.index)
        mixed = multiply_swiglu(self.gemms, linear, x)
        if mixed is None:
            mixed = self.elementwise.activate_mul(self.linear(linear, x), activation)
        return mixed

    def add_norm(
        self, linear: GpuLinear, y: Tensor, residual: Tensor, norm: Norm | None, after: Norm | None
    ) -> Tensor:
        return self.elementwise.add_norm(y, residual, norm, after)


@dataclass(frozen=True, slots=True)
class AugmentedLinearOps:
    """Linears whose GEMM computes LoRA's h as well; the following op adds h @ B where it can."""

    elementwise: ElementwiseOps
    augmented: AugmentedLoraOps
    lora: AugmentedStep
    gemms: GemmDispatcher

    def linear(self, linear: GpuLinear, x: Tensor) -> Tensor:
        index = linear.index
        if not self.lora.covers(index):
            return multiply(self.gemms, linear, x, splits=True)
        assert linear.augmented is not None, "no rows are appended to the weight"
        weight = linear.augmented.augmented(self.lora.num_appended_rows(index))
        y = multiply(self.gemms, linear, x, weight=weight, splits=True)
        if self._is_fused(linear):
            return y
        return self.augmented.expand(y, self.lora.at(linear.layer, index))

    def rotate_write(
        self, linear: GpuLinear, y: Tensor, rotation: Rotation, target: KVTarget
    ) -> Tensor:
        if self._is_fused(linear):
            lora = self.lora.at(linear.layer, linear.index)
            return self.augmented.rotate_write(y, rotation, target, lora)
        return self.elementwise.rotate_write(y, rotation, target)

    def glu(self, linear: GpuLinear, x: Tensor, activation: str) -> Tensor:
        if self._is_fused(linear):
            y, lora = self.linear(linear, x), self.lora.at(linear.layer, linear.index)
            return self.augmented.activate_mul(y, activation, lora)
        mixed = multiply_swiglu(self.gemms, linear, x)
        if mixed is None:
            mixed = self.elementwise.activate_mul(self.linear(linear, x), activation)
        return mixed

    def add_norm(
        self, linear: GpuLinear, y: Tensor, residual: Tensor, norm: Norm | None, after: Norm | None
    ) -> Tensor:
        if self._is_fused(linear):
            assert norm is not None, "a fused linear is followed by a norm"
            lora = self.lora.at(linear.layer, linear.index)
            return self.augmented.add_norm(y, residual, norm, after, lora)
        return self.elementwise.add_norm(y, residual, norm, after)

    def _is_fused(self, linear: GpuLinear) -> bool:
        """Whether the op that follows the GEMM adds h @ B."""
        if not linear.fuses or not self.lora.covers(linear.index):
            return False
        return self.lora.launch.fuses_norm or not linear.is_added


@dataclass(frozen=True, slots=True)
class GpuContext:
    """What every step of a decoder shares."""

    decoder: Decoder
    elementwise: ElementwiseOps
    layout: KVLayout
    storage: Tensor


class GpuOps:
    """DecoderOps of one step; nothing in it reads a value from the device."""

    def __init__(
        self, context: GpuContext, plan: DeviceAttentionPlan, linears: FusedLinearOps
    ) -> None:
        self._context = context
        self._plan = plan
        self._linears = linears
        self._activation = context.decoder.config.activation

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        decoder = self._context.decoder
        self._rotations = [
            self._rotation(cast(Rotary, rotary), positions) for rotary in decoder.rotaries
        ]
        residual: Tensor = decoder.embed_tokens(token_ids)
        return residual

    def norm(self, residual: Tensor, norm: Norm | None) -> Tensor:
        return self._context.elementwise.add_norm(None, residual, norm)

    def linear_rotate_write(self, attention: Attention[GpuLinear, Norm], x: Tensor) -> Tensor:
        context, index = self._context, attention.args.layer
        qkv = self._linears.linear(attention.qkv, x)
        if attention.wide_norms is not None:
            start = 0
            for norm in attention.wide_norms:
                size = norm.weight.numel()
                context.elementwise.norm_columns(qkv[:, start : start + size], norm)
                start += size
        cos, sin = self._rotations[attention.rope]
        target = KVTarget(context.storage, self._plan.slots, context.layout, index)
        rotation = Rotation(cos, sin, attention.head_norm)
        return self._linears.rotate_write(attention.qkv, qkv, rotation, target)

    def attend(self, attention: Attention[GpuLinear, Norm], q: Tensor) -> Tensor:
        return self._plan.attend(self._context.storage, q, attention.args)

    def select(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return attended, residual

    def linear_add_norm(
        self,
        linear: GpuLinear,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        after: Norm | None,
    ) -> Tensor:
        y = self._linears.linear(linear, x)
        return self._linears.add_norm(linear, y, residual, norm, after)

    def linear_glu(self, linear: GpuLinear, x: Tensor) -> Tensor:
        return self._linears.glu(linear, x, self._activation)

    def _rotation(self, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._context.elementwise.rotation(positions, rotary.frequencies, rotary.signs)
