"""The decoder over fused kernels, as a GPU runs it: the same weights, fewer launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from loramux.kernels.ops import (
    AttendArgs,
    DeviceAttentionPlan,
    DeviceKernels,
    KVTarget,
    Norm,
    PagedLayout,
    Rotation,
)
from loramux.lora.augmented_step import AugmentedStep
from loramux.models.augmented_linear import AugmentedLinear, appended_rows
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import Linear, RMSNorm, Rotary
from loramux.runner.gemm.dispatch import Gated, open_products
from loramux.runner.linear_ops import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    AugmentedOps,
    LoraStep,
    PlainOps,
    SiteOps,
    add_norm_behind,
)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Norm
    mlp_norm: Norm
    after_attention: Norm | None
    after_mlp: Norm | None
    head_norm: Norm | None
    sliding_window: int | None


class FusedDecoder:
    """At most nine launches a layer beside LoRA's: four products, and what stands between them."""

    def __init__(
        self, decoder: Decoder, kernels: DeviceKernels, layout: PagedLayout, storage: Tensor
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._kernels = kernels
        self._layout = layout
        self._storage = storage
        self._scale = config.query_scale
        self._softcap = config.attn_logit_softcap
        self._activation = config.activation
        self._layers = [_layer(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self._final_norm = _norm(decoder.norm)
        self.products = open_products(
            storage.device,
            _families(decoder, self._layers),
            add_norm_behind(kernels.elementwise, self._final_norm, storage.dtype),
            _gated(kernels, config.activation),
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def num_heads(self) -> int:
        return self._decoder.config.num_heads

    @property
    def layout(self) -> PagedLayout:
        return self._layout

    @property
    def windows(self) -> set[int | None]:
        """Of all layers; None: one that sees everything."""
        return {layer.sliding_window for layer in self._layers}

    @property
    def appended(self) -> list[list[Tensor]] | None:
        """[layers][sites] of [blocks, slices, 16, in]: room for adapters behind the weights."""
        return appended_rows(self._decoder)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: DeviceAttentionPlan,
        lora: LoraStep | AugmentedStep | None,
    ) -> Tensor:
        """The normed hidden state of every row. token_ids, positions [rows] int32"""
        elementwise, ops = self._kernels.elementwise, self._ops(lora)
        rotations = self._rotations(positions)
        hidden: Tensor = self._decoder.embed_tokens(token_ids)
        normed = elementwise.add_norm(None, hidden, self._layers[0].attention_norm)
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, normed, rotations, plan, ops)
            place = (index, OUT)
            x = ops.linear(layer.o, attended, place)
            normed = ops.add_norm(x, hidden, layer.mlp_norm, layer.after_attention, place)
            mixed = ops.gated(layer.gate_up, normed, self._activation, (index, GATE_UP))
            place = (index, DOWN)
            x = ops.linear(layer.down, mixed, place)
            normed = ops.add_norm(x, hidden, norms[index], layer.after_mlp, place)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] float32"""
        return self._decoder.logits(hidden)

    def empty_logits(self, num_rows: int) -> Tensor:
        """What write_logits fills, in the dtype that it needs."""
        config = self._decoder.config
        dtype = self._storage.dtype if config.final_logit_softcap is None else torch.float32
        return self._storage.new_empty(num_rows, config.vocab_size, dtype=dtype)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """As logits, not yet in float32 where the product is not."""
        head = _linear(self._decoder.lm_head)
        if self._decoder.config.final_logit_softcap is None and head.bias is None:
            self.products.linear(hidden, head.weight, out=out)
        else:
            out.copy_(self._decoder.logits(hidden))

    def _rotations(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(cos, sin) for layers that see all, and for those with a sliding window."""
        whole = self._rotation(self._decoder.rotary, positions)
        local = self._decoder.rotary_local
        return whole, whole if local is None else self._rotation(local, positions)

    def _rotation(self, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.elementwise.rotation(
            positions, rotary.frequencies, rotary.signs, rotary.attention_factor
        )

    def _attend(  # noqa: PLR0913
        self,
        index: int,
        layer: _Layer,
        normed: Tensor,
        rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        plan: DeviceAttentionPlan,
        ops: SiteOps,
    ) -> Tensor:
        place = (index, QKV)
        qkv = ops.linear(layer.qkv, normed, place)
        cos, sin = rotations[layer.sliding_window is not None]
        target = KVTarget(self._storage, plan.slots, self._layout, index)
        q = ops.rotate_write(qkv, Rotation(cos, sin, layer.head_norm), target, place)
        args = AttendArgs(
            layer=index,
            scale=self._scale,
            sliding_window=layer.sliding_window,
            softcap=self._softcap,
        )
        return plan.attend(self._storage, q, args)

    def _ops(self, lora: LoraStep | AugmentedStep | None) -> SiteOps:
        kernels = self._kernels
        if isinstance(lora, AugmentedStep):
            return AugmentedOps(kernels.elementwise, kernels.augmented, lora, self.products)
        return PlainOps(kernels.elementwise, lora, self.products)


def _gated(kernels: DeviceKernels, activation: str) -> Gated | None:
    if kernels.swiglu is None:
        return None
    return Gated(
        fits=kernels.swiglu.supports,
        at_once=partial(kernels.swiglu.linear_swiglu, activation=activation),
        activate=partial(kernels.elementwise.activate_mul, activation=activation),
    )


def _layer(layer: DecoderLayer) -> _Layer:
    head_norm = layer.head_norm
    return _Layer(
        qkv=_linear(layer.qkv),
        o=_linear(layer.o),
        gate_up=_linear(layer.gate_up),
        down=_linear(layer.down),
        attention_norm=_norm(layer.attention_norm),
        mlp_norm=_norm(layer.mlp_norm),
        after_attention=_maybe(layer.after_attention_norm),
        after_mlp=_maybe(layer.after_mlp_norm),
        head_norm=None if head_norm is None else Norm(head_norm.weight, head_norm.eps),
        sliding_window=layer.sliding_window,
    )


def _families(decoder: Decoder, layers: Sequence[_Layer]) -> list[list[Tensor]]:
    """The weights of each site, with their tails, and the head's."""
    sites = zip(*((layer.qkv, layer.o, layer.gate_up, layer.down) for layer in layers), strict=True)
    return [
        *(
            [
                linear.extended if isinstance(linear, AugmentedLinear) else linear.weight
                for linear in site
            ]
            for site in sites
        ),
        [_linear(decoder.lm_head).weight],
    ]


def _linear(module: nn.Module) -> Linear:
    assert isinstance(module, Linear), "a linear layer was packed or wrapped"
    return module


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _maybe(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else _norm(norm)
