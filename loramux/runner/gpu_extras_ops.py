"""Op set for DoRA, bias and full-module adapters; fuses fewer ops."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loramux.kernels.ops import DeviceAttentionPlan, ElementwiseOps, KVTarget, Norm, Rotation
from loramux.lora.extras_step import ExtrasStep
from loramux.runner.gemm.dispatch import GemmDispatcher
from loramux.runner.gpu_ops import GpuContext, GpuLinear, GpuOps, LoraStep, multiply
from loramux.types.model import ATTENTION_BLOCK


@dataclass(frozen=True, slots=True)
class ExtrasLinearOps:
    """Linears followed by the kernels of other parts, then by SGMV shrink and expand.

    A GEMM is neither split-K nor fused with the activation: its whole output is changed.
    """

    elementwise: ElementwiseOps
    lora: LoraStep
    gemms: GemmDispatcher
    extras: ExtrasStep

    def linear(self, linear: GpuLinear, x: Tensor) -> Tensor:
        y = self._changed(linear, x)
        if self.lora.covers(linear.index):
            self.lora.shrink(x, linear.layer, linear.index)
            self.lora.expand(y, linear.layer, linear.index)
        return y

    def rotate_write(
        self, linear: GpuLinear, y: Tensor, rotation: Rotation, target: KVTarget
    ) -> Tensor:
        return self.elementwise.rotate_write(y, rotation, target)

    def glu(self, linear: GpuLinear, x: Tensor, activation: str) -> Tensor:
        y = self._changed(linear, x)
        if not self.lora.covers(linear.index):
            return self.elementwise.activate_mul(y, activation)
        self.lora.shrink(x, linear.layer, linear.index)
        if not linear.fuses:
            self.lora.expand(y, linear.layer, linear.index)
            return self.elementwise.activate_mul(y, activation)
        return self.lora.expand_swiglu(y, activation, linear.layer, linear.index)

    def add_norm(
        self, linear: GpuLinear, y: Tensor, residual: Tensor, norm: Norm | None, after: Norm | None
    ) -> Tensor:
        normed = self.elementwise.add_norm(y, residual, norm, after)
        if norm is None:
            return normed
        if linear.block == ATTENTION_BLOCK:
            self.extras.change_mlp_norm(normed, linear.layer)
        else:
            self.extras.change_attention_norm(normed, linear.layer + 1)
        return normed

    def _changed(self, linear: GpuLinear, x: Tensor) -> Tensor:
        y = multiply(self.gemms, linear, x)
        self.extras.change_linear(y, x, linear.method.bias, linear.layer, linear.index)
        return y


class ExtrasGpuOps(GpuOps):
    """GpuOps with the embeddings and norms of adapters."""

    def __init__(
        self, context: GpuContext, plan: DeviceAttentionPlan, linears: ExtrasLinearOps
    ) -> None:
        super().__init__(context, plan, linears)
        self._extras = linears.extras

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        decoder = self._context.decoder
        # Tokens that an adapter adds to the vocabulary: it replaces their embedding.
        known = token_ids.clamp(max=decoder.config.vocab_size - 1)
        residual = super().embed(known, positions)
        self._extras.change_embedding(residual, token_ids, decoder.embed_tokens.scale)
        return residual

    def norm(self, residual: Tensor, norm: Norm | None) -> Tensor:
        """Return the attention norm of the first layer; `linear_add_norm` computes the others."""
        normed = super().norm(residual, norm)
        if norm is None:
            return normed
        self._extras.change_attention_norm(normed, 0)
        return normed
