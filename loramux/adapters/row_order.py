"""Brings the parts of an adapter from the row order of the checkpoint to that of the engine."""

from __future__ import annotations

from dataclasses import replace

from loramux.adapters.packed.extras import ExtraKind
from loramux.adapters.peft.parts import AdapterParts, ExtraTensor, LoraModule
from loramux.types.model import BaseModelInfo, LinearSpec


def in_engine_order(parts: AdapterParts, base: BaseModelInfo) -> AdapterParts:
    """Reorder B, gains, biases and whole weights of the projections that have a row map."""
    maps = {p.name: p.row_map.rows(p.out_features) for p in base.projections if p.row_map}
    if not maps:
        return parts
    columns = {linear.name: _columns(linear, maps) for linear in base.linears}
    return AdapterParts(
        modules=tuple(_reorder_module(module, maps) for module in parts.modules),
        extras=tuple(_reorder_extra(extra, maps, columns) for extra in parts.extras),
    )


def _columns(linear: LinearSpec, maps: dict[str, list[int]]) -> list[int]:
    """Return the order of a linear's outputs."""
    return [
        member.start + row
        for member in linear.members
        for row in maps.get(member.name, range(member.out_features))
    ]


def _reorder_module(module: LoraModule, maps: dict[str, list[int]]) -> LoraModule:
    rows = maps.get(module.target.projection)
    return module if rows is None else replace(module, b=module.b[rows])


def _reorder_extra(
    extra: ExtraTensor, maps: dict[str, list[int]], columns: dict[str, list[int]]
) -> ExtraTensor:
    _, module, kind = extra.key
    if kind is ExtraKind.WEIGHT and module in maps:
        return replace(extra, values=extra.values[maps[module]])
    if kind in (ExtraKind.GAIN, ExtraKind.BIAS) and module in columns:
        return replace(extra, values=extra.values[:, columns[module]])
    return extra
