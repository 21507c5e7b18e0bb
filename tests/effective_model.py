"""A transformers model as the base of an adapter, and the model that the adapter's parts make."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loramux.adapters.packed.extras import (
    ATTENTION_NORM,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP_NORM,
    MODEL_LEVEL,
    ExtraKind,
    ExtraSpec,
)
from loramux.adapters.peft.parts import AdapterParts
from loramux.models.architectures import base_info, parse_config
from loramux.types.model import BaseModelInfo


@dataclass(frozen=True)
class TransformersBase:
    """BaseWeights of a transformers model."""

    model: Any
    info: BaseModelInfo

    def linear(self, layer: int, projection: str) -> Any:
        (found,) = (t for t in self.info.targets if (t.layer, t.projection) == (layer, projection))
        return self.model.get_submodule(found.path)

    def weight(self, layer: int, projection: str) -> Tensor:
        return self.linear(layer, projection).weight.detach()

    def bias(self, layer: int, projection: str) -> Tensor | None:
        bias = self.linear(layer, projection).bias
        return None if bias is None else bias.detach()

    def norm_module(self, layer: int, name: str) -> Any:
        if name == FINAL_NORM:
            assert layer == MODEL_LEVEL
            return self.model.model.norm
        names = self.info.norm_names
        path = {ATTENTION_NORM: names.attention, MLP_NORM: names.mlp}[name]
        return getattr(self.model.model.layers[layer], path)

    def norm(self, layer: int, name: str) -> Tensor:
        return self.norm_module(layer, name).weight.detach() + self.info.norm_plus_one

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach()


def transformers_base(model: Any, name: str = "tiny") -> TransformersBase:
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return TransformersBase(model, base_info(parse_config(config), name))


@torch.no_grad()
def effective_model(base: TransformersBase, made: AdapterParts, specs: Iterable[ExtraSpec]) -> Any:
    """Return a copy of the base with the parts merged, as the kernels are defined to use them."""
    changed = TransformersBase(copy.deepcopy(base.model), base.info)
    parts = {extra.key: extra.values.float() for extra in made.extras}
    token_ids = {spec.module: list(spec.token_ids) for spec in specs if spec.token_ids}
    for fused in base.info.linears:
        starts = itertools.accumulate((0, *fused.out_features))
        for (projection, width), start in zip(
            zip(fused.projections, fused.out_features, strict=True), starts, strict=False
        ):
            columns = slice(start, start + width)
            for layer in range(base.info.num_layers):
                linear = changed.linear(layer, projection)
                replaced = parts.pop((layer, projection, ExtraKind.WEIGHT), None)
                if replaced is not None:
                    linear.weight = nn.Parameter(replaced)
                bias = torch.zeros(width) if linear.bias is None else linear.bias
                gain = parts.get((layer, fused.name, ExtraKind.GAIN))
                if gain is not None:
                    linear.weight.mul_(1 + gain[0, columns, None])
                    bias = bias * (1 + gain[0, columns])
                if (added := parts.get((layer, fused.name, ExtraKind.BIAS))) is not None:
                    bias = bias + added[0, columns]
                linear.bias = nn.Parameter(bias)
    for module in made.modules:
        linear = changed.linear(module.target.layer, module.target.projection)
        linear.weight += module.scale * (module.b.float() @ module.a.float())
    for (layer, name, kind), gain in parts.items():
        if name in (ATTENTION_NORM, MLP_NORM, FINAL_NORM):
            assert kind is ExtraKind.GAIN
            norm = changed.norm_module(layer, name)
            norm.weight.copy_((norm.weight + base.info.norm_plus_one) * (1 + gain[0]))
            norm.weight.sub_(float(base.info.norm_plus_one))
    _change_vocabulary(changed, parts, token_ids, base)
    return changed.model


def _change_vocabulary(
    changed: TransformersBase,
    parts: dict[Any, Tensor],
    token_ids: dict[str, list[int]],
    base: TransformersBase,
) -> None:
    model = changed.model
    model.config.tie_word_embeddings = False
    for module, original in ((EMBEDDING, base.embedding), (HEAD, base.head)):

        def part(kind: ExtraKind, module: str = module) -> Tensor | None:
            return parts.get((MODEL_LEVEL, module, kind))

        weight = part(ExtraKind.WEIGHT)
        weight = original.clone() if weight is None else weight.clone()
        if (rows := part(ExtraKind.ROWS)) is not None:
            weight[token_ids[module]] = rows
        if (gain := part(ExtraKind.GAIN)) is not None:
            weight *= 1 + gain
        if (a := part(ExtraKind.LOW_RANK_A)) is not None:
            b = part(ExtraKind.LOW_RANK_B)
            assert b is not None
            weight += a @ b if module == EMBEDDING else b @ a
        if module == EMBEDDING:
            model.get_input_embeddings().weight = nn.Parameter(weight)
            continue
        head = nn.Linear(weight.shape[1], weight.shape[0])
        head.weight = nn.Parameter(weight)
        bias = part(ExtraKind.BIAS)
        head.bias = nn.Parameter(torch.zeros(len(weight)) if bias is None else bias[:, 0])
        model.set_output_embeddings(head)
