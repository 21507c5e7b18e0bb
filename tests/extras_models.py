"""Adapters of all kinds for small models, and the models with the adapters merged into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loramux.adapters.packed.extras import (
    EMBEDDING,
    HEAD,
    MODEL_LEVEL,
    ExtraKey,
    ExtraKind,
    ExtraSpec,
)
from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.writers import write_extra
from loramux.adapters.peft.parts import ExtraTensor, LoraModule
from loramux.engine.engine import Engine
from loramux.types.adapter import AdapterCard
from loramux.types.model import BaseModelInfo
from tests.linear_specs import PROJECTIONS_OF

_RANK = 3
GAIN, BIAS, WEIGHT, ROWS = ExtraKind.GAIN, ExtraKind.BIAS, ExtraKind.WEIGHT, ExtraKind.ROWS
A, B = ExtraKind.LOW_RANK_A, ExtraKind.LOW_RANK_B


@dataclass
class Adapter:
    """Low rank by (layer, projection) as A and B, and other parts."""

    low_rank: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    extras: dict[ExtraKey, Tensor] = field(default_factory=dict)
    token_ids: dict[ExtraKey, tuple[int, ...]] = field(default_factory=dict)


def linears_of(model: Any) -> list[dict[str, Any]]:
    """Return the linear modules of each layer by projection."""
    return [
        {
            name: getattr(block, name)
            for block in (layer.self_attn, layer.mlp)
            for names in PROJECTIONS_OF.values()
            for name in names
            if hasattr(block, name)
        }
        for layer in model.model.layers
    ]


def random_adapters(base: BaseModelInfo, *, std: float = 0.3) -> dict[str, Adapter]:
    """Return an adapter of each kind; "wide" has tokens that the model does not have."""
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    shapes = {one.name: (one.in_features, one.out_features) for one in base.projections}
    vocab, hidden, last = base.vocab_size, base.hidden_size, base.num_layers - 1
    widths = {site.name: sum(site.out_features) for site in base.linears}
    vectors = {
        (last, site, kind): noise(1, w) for site, w in widths.items() for kind in (GAIN, BIAS)
    }
    low_rank = {
        (layer, name): (noise(_RANK, shapes[name][0]), noise(shapes[name][1], _RANK))
        for layer in range(base.num_layers)
        for name in ("q_proj", "v_proj", "down_proj", "up_proj")
    }
    norms = {(last, "attention_norm", GAIN): noise(1, hidden)}
    norms |= {(last, "mlp_norm", GAIN): noise(1, hidden)}
    norms |= {(MODEL_LEVEL, "final_norm", GAIN): noise(1, hidden)}
    weights = {
        (last, name, WEIGHT): noise(*reversed(shapes[name]))
        for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    }
    embed, head = (MODEL_LEVEL, EMBEDDING), (MODEL_LEVEL, HEAD)
    ranks = {
        (*embed, A): noise(vocab, 5),
        (*embed, B): noise(5, hidden),
        (*head, A): noise(4, hidden),
        (*head, B): noise(vocab, 4),
        (*head, GAIN): noise(vocab, 1),
        (*head, BIAS): noise(vocab, 1),
    }
    rows = {(*embed, ROWS): noise(3, hidden), (*head, ROWS): noise(3, hidden)}
    whole = {(*embed, WEIGHT): noise(vocab, hidden), (*head, WEIGHT): noise(vocab - 9, hidden)}
    wide = {(*embed, WEIGHT): noise(vocab + 7, hidden), (*head, WEIGHT): noise(vocab + 7, hidden)}
    return {
        "dora": Adapter(low_rank, {**vectors, **norms}),
        "scales": Adapter(extras={(0, "gate_up", GAIN): noise(1, widths["gate_up"])}),
        "full": Adapter(extras={**weights, **whole}),
        "ranks": Adapter(low_rank, ranks),
        "rows": Adapter(extras=rows, token_ids=dict.fromkeys(rows, (5, 40, vocab - 1))),
        "wide": Adapter(low_rank, wide),
    }


def register(engine: Engine, adapters: Mapping[str, Adapter]) -> None:
    """Make the adapters known to an engine, with their images in host memory; names are CIDs."""
    targets = {(target.layer, target.projection): target for target in engine.catalog.base.targets}
    packing = engine.catalog.rules.packing
    for cid, adapter in adapters.items():
        ranks = {place: len(a) for place, (a, _) in adapter.low_rank.items()}
        specs = [
            ExtraSpec(*key, *values.shape, adapter.token_ids.get(key, ()))
            for key, values in adapter.extras.items()
        ]
        layout = packing.plan(ranks, specs)
        buffer = packing.allocate(layout.num_elements, packing.dtype)
        write = packing.writer(layout, buffer)
        for place, (a, b) in adapter.low_rank.items():
            write(LoraModule(targets[place], len(a), float(len(a)), 1.0, a, b))
        for key, values in adapter.extras.items():
            write_extra(layout.extras, buffer, ExtraTensor(key, values))
        image = AdapterImage(cid=cid, layout=layout, buffer=buffer)
        engine.catalog._known[cid] = AdapterCard(
            cid=cid,
            path="no-folder",
            rank=layout.max_rank,
            num_bytes=image.num_bytes,
        )
        host = engine.memory.tiers.host
        host.reserve(cid, image.num_bytes)
        host.put(image)


def merged_model(model: Any, parts: Sequence[tuple[Adapter, float]]) -> Any:
    """Change the weights of a model to those that the adapters, times their weights, make of it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Tied weights are changed apart.
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for layer, linears in enumerate(linears_of(model)):
        for site, names in PROJECTIONS_OF.items():
            start = 0
            for name in (name for name in linears if name in names):
                columns = slice(start, start + linears[name].out_features)
                start = columns.stop
                _merge(linears[name], parts, (layer, site), (layer, name), columns)
    _merge_norms(model, parts)
    for module, name in ((embedding, EMBEDDING), (head, HEAD)):
        _merge_tokens(module, parts, (MODEL_LEVEL, name))
    return model


def _merge(
    linear: Any,
    parts: Sequence[tuple[Adapter, float]],
    site: tuple[int, str],
    place: tuple[int, str],
    columns: slice,
) -> None:
    weight = linear.weight.detach()
    bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach()
    gain, added = torch.zeros(len(weight)), torch.zeros(len(weight))
    delta = torch.zeros_like(weight)
    for adapter, factor in parts:
        weight = adapter.extras.get((*place, WEIGHT), weight)
        for total, kind in ((gain, GAIN), (added, BIAS)):
            if (vector := adapter.extras.get((*site, kind))) is not None:
                total += factor * vector[0, columns]
        if place in adapter.low_rank:
            a, b = adapter.low_rank[place]
            delta += factor * b @ a
    linear.weight = torch.nn.Parameter((1 + gain)[:, None] * weight + delta)
    linear.bias = torch.nn.Parameter((1 + gain) * bias + added)


def _merge_norms(model: Any, parts: Sequence[tuple[Adapter, float]]) -> None:
    for layer, module in enumerate(model.model.layers):
        is_sandwich = hasattr(module, "pre_feedforward_layernorm")
        names = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
        _scale_norm(module.input_layernorm, parts, (layer, "attention_norm", GAIN), is_sandwich)
        _scale_norm(getattr(module, names), parts, (layer, "mlp_norm", GAIN), is_sandwich)
    key = (MODEL_LEVEL, "final_norm", GAIN)
    _scale_norm(model.model.norm, parts, key, is_sandwich)


def _scale_norm(
    norm: Any, parts: Sequence[tuple[Adapter, float]], key: ExtraKey, is_plus_one: bool
) -> None:
    """is_plus_one: the module multiplies by weight + 1"""
    for adapter, factor in parts:
        if key in adapter.extras:
            weight = norm.weight.detach() + float(is_plus_one)
            weight = weight * (1 + factor * adapter.extras[key][0])
            norm.weight = torch.nn.Parameter(weight - float(is_plus_one))


def _merge_tokens(
    module: Any, parts: Sequence[tuple[Adapter, float]], place: tuple[int, str]
) -> None:
    """Change the weight of the embedding or the head, and the bias of the head."""
    weight = module.weight.detach()
    bias = torch.zeros(len(weight))
    for adapter, factor in parts:
        extras = adapter.extras
        weight = extras.get((*place, WEIGHT), weight)
        if (*place, ROWS) in extras:
            weight[list(adapter.token_ids[*place, ROWS])] = extras[*place, ROWS]
        if (*place, GAIN) in extras:
            weight = weight * (1 + factor * extras[*place, GAIN])
            bias = bias + factor * extras[*place, BIAS][:, 0]
        if (*place, A) in extras:
            a, b = extras[*place, A], extras[*place, B]
            weight = weight + factor * (a @ b if place[1] == EMBEDDING else b @ a)
    module.weight = torch.nn.Parameter(weight)
    if place[1] == HEAD and bias.any():
        module.bias = torch.nn.Parameter(bias)
