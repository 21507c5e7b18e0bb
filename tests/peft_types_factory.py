"""Adapters of PEFT types other than LORA, and what PEFT and loramux compute from them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from loramux.adapters.packed.extras import (
    ATTENTION_NORM,
    FINAL_NORM,
    MLP_NORM,
    ExtraKind,
)
from loramux.adapters.peft.inspection import InspectedAdapter, Inspector
from loramux.adapters.peft.parts import AdapterParts
from loramux.types.model import BaseModelInfo
from tests.adapter_factory import BASE_NAME

NORMS = {ATTENTION_NORM: "input_layernorm", MLP_NORM: "post_attention_layernorm"}


class ModelWeights:
    """BaseWeights of a transformers model with Llama's layers."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._modules = dict(model.named_modules())

    def linear(self, layer: int, projection: str) -> torch.nn.Linear:
        block = "self_attn" if projection[0] in "qkvo" else "mlp"
        if projection in ("up_proj", "gate_proj", "down_proj"):
            block = "mlp"
        return self._modules[f"model.layers.{layer}.{block}.{projection}"]

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        return self.linear(layer, projection).weight

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        return self.linear(layer, projection).bias

    def norm_module(self, layer: int, name: str) -> torch.nn.Module:
        path = "model.norm" if name == FINAL_NORM else f"model.layers.{layer}.{NORMS[name]}"
        return self._modules[path]

    def norm(self, layer: int, name: str) -> torch.Tensor:
        return self.norm_module(layer, name).weight

    @property
    def embedding(self) -> torch.Tensor:
        return self._model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        return self._model.get_output_embeddings().weight


def save_type(folder: Path, model: LlamaForCausalLM, config: Any, *, seed: int = 0) -> Path:
    """Lets PEFT write an adapter with random trained values; the model is not changed."""
    from peft import get_peft_model

    model = copy.deepcopy(model)
    model.name_or_path = BASE_NAME
    config.base_model_name_or_path = BASE_NAME
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = parameter.data + noise
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def change_config(folder: Path, **fields: object) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def logits_of_peft(folder: Path, model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    from peft import PeftModel

    peft_model = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    with torch.no_grad():
        return peft_model(tokens).logits


def read_parts(
    folder: Path, base: BaseModelInfo, model: LlamaForCausalLM, **rules: Any
) -> tuple[InspectedAdapter, AdapterParts]:
    with Inspector(base, **rules).open(folder.resolve()) as (found, weights):
        tensors = weights.load().tensors
    return found, found.contents.make_parts(tensors, ModelWeights(model))


def logits_of_parts(
    parts: AdapterParts, base: BaseModelInfo, model: LlamaForCausalLM, tokens: torch.Tensor
) -> torch.Tensor:
    """Run the model with the parts as the kernels use them, in PEFT's place."""
    model = copy.deepcopy(model)
    weights = ModelWeights(model)
    extras = {extra.key: extra.values for extra in parts.extras}
    low = {(m.target.layer, m.target.projection): m for m in parts.modules}
    for target in base.targets:
        linear = weights.linear(target.layer, target.projection)
        change_linear(linear, target.layer, target.projection, base, extras, low)
    for (layer, name, _), gain in extras.items():
        if name in (ATTENTION_NORM, MLP_NORM, FINAL_NORM):
            norm = weights.norm_module(layer, name)
            norm.weight.data = norm.weight.data * (1 + gain[0])
    with torch.no_grad():
        return model(tokens).logits


def change_linear(
    linear: torch.nn.Linear,
    layer: int,
    projection: str,
    base: BaseModelInfo,
    extras: Mapping[Any, torch.Tensor],
    low: Mapping[tuple[int, str], Any],
) -> None:
    fused = next(fused for fused in base.linears if projection in fused.projections)
    index = fused.projections.index(projection)
    start = sum(fused.out_features[:index])
    columns = slice(start, start + fused.out_features[index])
    weight = extras.get((layer, projection, ExtraKind.WEIGHT), linear.weight.data)
    bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.data
    gain = extras.get((layer, fused.name, ExtraKind.GAIN))
    if gain is not None:
        weight = weight * (1 + gain[0, columns, None])
        bias = bias * (1 + gain[0, columns])
    added = extras.get((layer, fused.name, ExtraKind.BIAS))
    if added is not None:
        bias = bias + added[0, columns]
    module = low.get((layer, projection))
    if module is not None:
        weight = weight + module.scale * (module.b @ module.a)
    linear.weight.data = weight
    linear.bias = torch.nn.Parameter(bias)
