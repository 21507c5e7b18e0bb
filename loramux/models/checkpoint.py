"""Maps the tensors of a Hugging Face checkpoint to the decoder's fused weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import LinearMethod, dense_of
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import RMSNorm

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Slot:
    """The destination of one checkpoint tensor in the decoder."""

    target: Tensor
    """A view into a parameter; a leading dimension broadcasts the tensor."""
    shape: tuple[int, ...]
    """The shape that the checkpoint tensor must have."""
    plus: float = 0.0
    """Added to every element when the tensor is copied."""

    def fill(self, name: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise UnsupportedModel(
                f"{name} has shape {list(tensor.shape)} where config.json asks for "
                f"{list(self.shape)}."
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{name} is stored as {tensor.dtype}; only float32, float16 and bfloat16 weights "
                "can be served."
            )
        self.target.copy_(tensor)
        if self.plus:
            self.target.add_(self.plus)


def checkpoint_slots(decoder: Decoder) -> dict[str, Slot]:
    """Map the name of every required checkpoint tensor to its slot."""
    config = decoder.config
    slots = {"model.embed_tokens.weight": whole(decoder.embed_tokens.weight)}
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        slots |= {prefix + name: slot for name, slot in layer_slots(decoder, layer)}
    slots["model.norm.weight"] = norm_slot(decoder, decoder.norm)
    if not config.tie_embeddings:
        name = "score" if config.num_labels else "lm_head"
        slots[f"{name}.weight"] = whole(dense_of(decoder.lm_head).weight)
    return slots


def layer_slots(decoder: Decoder, layer: nn.Module) -> Iterator[tuple[str, Slot]]:
    layer = cast(DecoderLayer, layer)
    config = decoder.config
    q_size, kv_size, inner = config.q_size, config.kv_size, config.intermediate_size
    yield from fused_slots(
        layer.qkv,
        {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size},
    )
    yield from fused_slots(layer.o, {"self_attn.o_proj": config.hidden_size})
    yield from fused_slots(layer.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner})
    yield from fused_slots(layer.down, {"mlp.down_proj": config.hidden_size})
    yield "input_layernorm.weight", norm_slot(decoder, layer.attention_norm)
    if layer.after_attention_norm is not None and layer.after_mlp_norm is not None:
        yield "post_attention_layernorm.weight", norm_slot(decoder, layer.after_attention_norm)
        yield "pre_feedforward_layernorm.weight", norm_slot(decoder, layer.mlp_norm)
        yield "post_feedforward_layernorm.weight", norm_slot(decoder, layer.after_mlp_norm)
    else:
        yield "post_attention_layernorm.weight", norm_slot(decoder, layer.mlp_norm)
    if layer.head_norm is not None:
        plus = 1.0 if config.norm_plus_one else 0.0
        heads, shape = layer.head_norm.weight.data, (config.head_dim,)
        yield "self_attn.q_norm.weight", Slot(heads[: config.num_heads], shape, plus)
        yield "self_attn.k_norm.weight", Slot(heads[config.num_heads :], shape, plus)


def fused_slots(linear: LinearMethod, rows_of: dict[str, int]) -> Iterator[tuple[str, Slot]]:
    weight, bias = dense_of(linear)
    start = 0
    for name, num_rows in rows_of.items():
        yield f"{name}.weight", whole(weight[start : start + num_rows])
        if bias is not None:
            yield f"{name}.bias", whole(bias[start : start + num_rows])
        start += num_rows


def norm_slot(decoder: Decoder, norm: RMSNorm) -> Slot:
    return Slot(
        norm.weight.data, tuple(norm.weight.shape), 1.0 if decoder.config.norm_plus_one else 0.0
    )


def whole(target: Tensor) -> Slot:
    return Slot(target.data, tuple(target.shape))
