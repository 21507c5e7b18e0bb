"""The decoder over compiled loops, as a CPU runs it: the same linear layers, less between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from loramux.kernels.fused_torch import KVTarget, Norm, Rotation
from loramux.kernels.interface import AttendArgs, Kernels, PagedLayout
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import RMSNorm, Rotary


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    attention_norm: Norm
    mlp_norm: Norm
    after_attention: Norm | None
    after_mlp: Norm | None
    head_norm: Norm | None
    args: AttendArgs


class JitDecoder:
    """Made when all linear layers have been packed and wrapped: it calls them as they are then."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels, layout: PagedLayout, storage: Tensor
    ) -> None:
        self._decoder = decoder
        self._fused, self._attention = kernels.fused, kernels.attention
        self._layout = layout
        self._storage = storage
        self._activation = decoder.config.activation
        self._layers = [_layer(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self._norms = [layer.attention_norm for layer in self._layers[1:]] + [_norm(decoder.norm)]

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """As Decoder.forward: the normed hidden state of every row. plan: of the attention."""
        fused, attention, storage = self._fused, self._attention, self._storage
        whole = self._rotation(self._decoder.rotary, positions)
        local = self._decoder.rotary_local
        rotations = whole, whole if local is None else self._rotation(local, positions)
        hidden: Tensor = self._decoder.embed_tokens(token_ids)
        normed: Tensor = fused.add_norm(None, hidden, self._layers[0].attention_norm)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            cos, sin = rotations[layer.args.sliding_window is not None]
            target = KVTarget(storage, plan.slots, self._layout, layer.args.layer)
            rotation = Rotation(cos, sin, layer.head_norm)
            q = fused.rotate_write(layer.qkv(normed), rotation, target)
            x = layer.o(attention.attend(storage, plan, q, layer.args))
            normed = fused.add_norm(x, hidden, layer.mlp_norm, layer.after_attention)
            mixed = fused.activate_mul(layer.gate_up(normed), self._activation)
            normed = fused.add_norm(layer.down(mixed), hidden, next_norm, layer.after_mlp)
        return normed

    def _rotation(self, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._fused.rotation(
            positions, rotary.frequencies, rotary.signs, rotary.attention_factor
        )
        return found


def _layer(layer: DecoderLayer) -> _Layer:
    head_norm = layer.head_norm
    return _Layer(
        qkv=layer.qkv,
        o=layer.o,
        gate_up=layer.gate_up,
        down=layer.down,
        attention_norm=_norm(layer.attention_norm),
        mlp_norm=_norm(layer.mlp_norm),
        after_attention=_maybe(layer.after_attention_norm),
        after_mlp=_maybe(layer.after_mlp_norm),
        head_norm=None if head_norm is None else Norm(head_norm.weight, head_norm.eps),
        args=AttendArgs(
            layer=layer.layer,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
        ),
    )


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _maybe(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else _norm(norm)
