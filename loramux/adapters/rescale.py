"""Fits adapters of an original model to a checkpoint whose quantiser folded scales into weights.

AWQ and SmoothQuant divide the norm before a linear by s and multiply the linear's weights by s, per
input; AWQ also divides rows of up_proj and multiplies columns of down_proj. The model computes the
same, but its linears see x / s, and rows of up_proj give y / s. An adapter that was trained on the
original is changed accordingly, which is exact: A * diag(s) and diag(1 / s) * B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loramux.adapters.packed.extras import ExtraKind
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, ExtraTensor, LoraModule

if TYPE_CHECKING:
    import torch

Site = tuple[int, str]
"""(layer, projection, fused linear or norm)"""


@dataclass(frozen=True, slots=True, eq=False)
class FoldedScales:
    """The scales s by which a checkpoint differs from its original; float32, on the CPU."""

    inputs: Mapping[Site, torch.Tensor]
    """The projection sees x / s: its weights were multiplied by s. [in]"""
    outputs: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    """The projection, or the fused linear, gives y / s: its rows were divided by s. [out]"""
    norms: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    """The weight of the norm was divided by s. [hidden]"""
    digest: str = ""
    """Identity of the original model."""


class OriginalWeights:
    """BaseWeights of the original model, computed from those of the served checkpoint."""

    def __init__(self, served: BaseWeights, scales: FoldedScales) -> None:
        self._served = served
        self._scales = scales

    def weight(self, layer: int, projection: str) -> torch.Tensor:
        weight = self._served.weight(layer, projection)
        site = layer, projection
        if site in self._scales.inputs:
            weight = weight / _like(self._scales.inputs[site], weight)
        if site in self._scales.outputs:
            weight = weight * _like(self._scales.outputs[site], weight)[:, None]
        return weight

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        bias = self._served.bias(layer, projection)
        scale = self._scales.outputs.get((layer, projection))
        return bias if bias is None or scale is None else bias * _like(scale, bias)

    def norm(self, layer: int, name: str) -> torch.Tensor:
        weight = self._served.norm(layer, name)
        scale = self._scales.norms.get((layer, name))
        return weight if scale is None else weight * _like(scale, weight)

    @property
    def embedding(self) -> torch.Tensor:
        return self._served.embedding

    @property
    def head(self) -> torch.Tensor:
        return self._served.head


def _like(scale: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return scale.to(device=other.device, dtype=other.dtype)


def rescaled(parts: AdapterParts, scales: FoldedScales) -> AdapterParts:
    """Return the parts as they act on the served checkpoint; rows are in the checkpoint's order.

    Gains stay: they multiply an output or a norm, whatever scale is folded into it.
    """
    return AdapterParts(
        modules=tuple(_rescale_module(module, scales) for module in parts.modules),
        extras=tuple(_rescale_extra(extra, scales) for extra in parts.extras),
    )


def _rescale_module(module: LoraModule, scales: FoldedScales) -> LoraModule:
    site = module.target.layer, module.target.projection
    if site in scales.inputs:
        module = replace(module, a=module.a.float() * scales.inputs[site])
    if site in scales.outputs:
        module = replace(module, b=module.b.float() / scales.outputs[site][:, None])
    return module


def _rescale_extra(extra: ExtraTensor, scales: FoldedScales) -> ExtraTensor:
    layer, module, kind = extra.key
    site, values = (layer, module), extra.values
    if kind is ExtraKind.WEIGHT:
        if site in scales.inputs:
            values = values.float() * scales.inputs[site]
        if site in scales.outputs:
            values = values.float() / scales.outputs[site][:, None]
    elif kind is ExtraKind.BIAS and site in scales.outputs:
        values = values.float() / scales.outputs[site]
    return replace(extra, values=values)
