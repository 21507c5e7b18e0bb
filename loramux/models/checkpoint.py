"""Maps the tensors of a Hugging Face checkpoint to the decoder's fused weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from loramux.kernels.linear import Slot
from loramux.models.architectures import head_linear, linears_of
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import RMSNorm
from loramux.models.slots import TensorSlot, whole


def checkpoint_slots(decoder: Decoder) -> dict[str, Slot]:
    """Map the name of every required checkpoint tensor to its slot."""
    config = decoder.config
    slots: dict[str, Slot] = {"model.embed_tokens.weight": whole(decoder.embed_tokens.weight)}
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        slots |= {prefix + name: slot for name, slot in layer_slots(decoder, layer)}
    slots["model.norm.weight"] = norm_slot(decoder, decoder.norm)
    if not config.tie_embeddings:
        (head,) = head_linear(config).members
        found = decoder.lm_head.slots(head)
        slots |= {f"{head.name}.{parameter}": slot for parameter, slot in found.items()}
    return slots


def layer_slots(decoder: Decoder, layer: nn.Module) -> Iterator[tuple[str, Slot]]:
    layer = cast(DecoderLayer, layer)
    config = decoder.config
    for spec in linears_of(config):
        for projection in spec.members:
            path = f"{spec.block}.{projection.name}"
            for parameter, slot in layer.linear(spec.name).slots(projection).items():
                yield f"{path}.{parameter}", slot
    norms = {
        config.norm_names.attention: layer.attention_norm,
        config.norm_names.mlp: layer.mlp_norm,
        config.norm_names.after_attention: layer.after_attention_norm,
        config.norm_names.after_mlp: layer.after_mlp_norm,
    }
    if layer.wide_norm is not None:
        norms["self_attn.q_norm"] = layer.wide_norm.query
        norms["self_attn.k_norm"] = layer.wide_norm.key
    for name, norm in norms.items():
        if norm is not None:
            yield f"{name}.weight", norm_slot(decoder, norm)
    if layer.head_norm is not None:
        plus = 1.0 if config.norm_plus_one else 0.0
        heads, shape = layer.head_norm.weight.data, (config.head_dim,)
        yield "self_attn.q_norm.weight", TensorSlot(heads[: config.num_heads], shape, plus)
        yield "self_attn.k_norm.weight", TensorSlot(heads[config.num_heads :], shape, plus)


def norm_slot(decoder: Decoder, norm: RMSNorm) -> TensorSlot:
    return TensorSlot(
        norm.weight.data, tuple(norm.weight.shape), 1.0 if decoder.config.norm_plus_one else 0.0
    )
