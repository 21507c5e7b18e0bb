"""Shapes of a base model: its linear layers and the geometry of its KV cache, without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

PackingKind = Literal["dense", "paged"]
"""The layout of adapter weights: dense matrices on a CPU, rank blocks in pages on a GPU."""
FUSED_LINEARS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears of a decoder layer, each computing the projections that read the same input at once."""
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the checkpoint that adapters may change, present in every layer."""

    name: str
    """q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj"""
    in_features: int
    out_features: int

    @property
    def block(self) -> str:
        """Submodule of a decoder layer that holds the projection."""
        return "self_attn" if self.name in ATTENTION_PROJECTIONS else "mlp"


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear of the decoder; projection i writes out_features[i] columns of its output."""

    name: str
    """qkv, o, gate_up or down"""
    in_features: int
    projections: tuple[str, ...]
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Shape of a KV page: [layers, key and value, block_tokens, kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_elements(self) -> int:
        return self.num_layers * 2 * self.block_tokens * self.token_elements


@dataclass(frozen=True, slots=True)
class TargetModule:
    """One projection of one decoder layer, as adapters address it."""

    path: str
    """Module path in the checkpoint: model.layers.3.self_attn.q_proj"""
    layer: int
    projection: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelInfo:
    """The shapes of a base model that adapter checks, capacity plans and the engine share."""

    name: str
    architecture: str
    num_layers: int
    projections: tuple[Projection, ...]
    """In the order of the checkpoint."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    tie_embeddings: bool = False
    """Whether the output head is the embedding."""
    biased: tuple[str, ...] = ()
    """The projections that have a bias."""
    sandwich_norms: bool = False
    """Whether the outputs of attention and MLP are normed as well as their inputs."""
    norm_plus_one: bool = False
    """Whether the checkpoint stores norm weights minus one."""
    num_labels: int = 0
    """Outputs of the classification head that the model has instead of one over its vocabulary."""

    @property
    def hidden_size(self) -> int:
        return self.projections[0].in_features

    @property
    def targets(self) -> tuple[TargetModule, ...]:
        """The projections of every layer, layer by layer."""
        return _targets(self.num_layers, self.projections)

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return fuse_projections(self.projections)

    @property
    def kv_token_elements(self) -> int:
        """Elements of one token's keys and values over all layers."""
        return self.kv_layout(block_tokens=1).page_elements

    def kv_layout(self, block_tokens: int) -> PagedLayout:
        """The layout of KV pages that hold block_tokens tokens each."""
        return PagedLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_tokens)


def fuse_projections(projections: Iterable[Projection]) -> tuple[FusedLinear, ...]:
    """The fused linears of a decoder layer that has these projections."""
    known = {projection.name: projection for projection in projections}
    return tuple(
        FusedLinear(
            name=name,
            in_features=known[members[0]].in_features,
            projections=members,
            out_features=tuple(known[member].out_features for member in members),
        )
        for name, members in FUSED_LINEARS.items()
        if members[0] in known
    )


@lru_cache(maxsize=8)
def _targets(num_layers: int, projections: tuple[Projection, ...]) -> tuple[TargetModule, ...]:
    return tuple(
        TargetModule(
            path=f"model.layers.{layer}.{projection.block}.{projection.name}",
            layer=layer,
            projection=projection.name,
            in_features=projection.in_features,
            out_features=projection.out_features,
        )
        for layer in range(num_layers)
        for projection in projections
    )
