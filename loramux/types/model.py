"""Description of a base model's linear layers and KV geometry, without weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear layer of the base that an adapter may change."""

    path: str
    """As in the checkpoint: model.layers.3.self_attn.q_proj"""
    layer: int
    projection: str
    """q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj"""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What the adapter doctor must know of a base, without its weights."""

    name: str
    architecture: str
    num_layers: int
    targets: tuple[TargetModule, ...]
