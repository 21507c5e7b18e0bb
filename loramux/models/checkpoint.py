"""Maps the tensors of a Hugging Face checkpoint to the decoder's fused weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import LinearMethod, dense_of
from loramux.models.architectures import projections_of
from loramux.models.decoder import Decoder, DecoderLayer
from loramux.models.layers import RMSNorm
from loramux.types.model import LINEARS, Projection, RowMap

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
    row_map: RowMap | None = None
    """Order of the tensor's rows in the target."""

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
        if self.row_map is not None:
            tensor = tensor[self.row_map.rows(len(tensor))]
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
    projections = projections_of(config)
    for name in LINEARS:
        found = [projection for projection in projections if projection.linear == name]
        yield from fused_slots(getattr(layer, name), found)
    norms = {
        config.norm_names.attention: layer.attention_norm,
        config.norm_names.mlp: layer.mlp_norm,
        config.norm_names.after_attention: layer.after_attention_norm,
        config.norm_names.after_mlp: layer.after_mlp_norm,
    }
    if layer.wide_norm is not None:
        norms["self_attn.q_norm"] = layer.wide_norm.query
        norms["self_attn.k_norm"] = layer.wide_norm.key
    for path, norm in norms.items():
        if norm is not None:
            yield f"{path}.weight", norm_slot(decoder, norm)
    if layer.head_norm is not None:
        plus = 1.0 if config.norm_plus_one else 0.0
        heads, shape = layer.head_norm.weight.data, (config.head_dim,)
        yield "self_attn.q_norm.weight", Slot(heads[: config.num_heads], shape, plus)
        yield "self_attn.k_norm.weight", Slot(heads[config.num_heads :], shape, plus)


def fused_slots(
    linear: LinearMethod, projections: Sequence[Projection]
) -> Iterator[tuple[str, Slot]]:
    weight, bias = dense_of(linear)
    start = 0
    for projection in projections:
        path = f"{projection.block}.{projection.name}"
        rows = slice(start, start + projection.out_features)
        yield f"{path}.weight", whole(weight[rows], projection.row_map)
        if bias is not None:
            yield f"{path}.bias", whole(bias[rows], projection.row_map)
        start += projection.out_features


def norm_slot(decoder: Decoder, norm: RMSNorm) -> Slot:
    return Slot(
        norm.weight.data, tuple(norm.weight.shape), 1.0 if decoder.config.norm_plus_one else 0.0
    )


def whole(target: Tensor, row_map: RowMap | None = None) -> Slot:
    return Slot(target.data, tuple(target.shape), row_map=row_map)
