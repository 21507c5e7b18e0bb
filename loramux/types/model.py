"""Shapes of a base model: its linear layers and the geometry of its KV cache, without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from loramux.types.kv import KVLayout

PackingKind = Literal["dense", "paged"]
"""The layout of adapter weights: dense matrices on a CPU, rank blocks in pages on a GPU."""
TEXT_PREFIX = "model."
"""Prefix of the decoder's module paths in the checkpoint of a text model."""
LINEARS = ("qkv", "o", "gate_up", "down")
"""Linears of a decoder layer, each computing the projections that read the same input at once."""
PROJECTION_PLACES: dict[str, tuple[str, int]] = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "qkv_proj": ("qkv", 0),
    "o_proj": ("o", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "gate_up_proj": ("gate_up", 0),
    "down_proj": ("down", 0),
}
"""Linear of each projection that a checkpoint may have, and its number among the linear's."""


@dataclass(frozen=True, slots=True)
class RowMap:
    """Order of a projection's output rows in the engine, where the checkpoint has another one.

    The engine rotates dimension i of a head with dimension i + head_dim / 2; the map brings the
    pairs of partial and interleaved rotary embeddings to these places.
    """

    num_heads: int
    """Heads that are reordered; the rows after them stay where they are."""
    head_order: tuple[int, ...]
    """Row i of a head in the engine is row head_order[i] of it in the checkpoint."""

    def rows(self, num_rows: int) -> list[int]:
        """Return the checkpoint row of each engine row."""
        size = len(self.head_order)
        heads = [head * size + row for head in range(self.num_heads) for row in self.head_order]
        return [*heads, *range(len(heads), num_rows)]

    def inverse(self) -> RowMap:
        """Return the map from the engine's order to the checkpoint's."""
        order = sorted(range(len(self.head_order)), key=self.head_order.__getitem__)
        return RowMap(self.num_heads, tuple(order))


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the checkpoint that adapters may change, present in every layer."""

    name: str
    """A key of PROJECTION_PLACES"""
    in_features: int
    out_features: int
    row_map: RowMap | None = None
    """None: the engine keeps the order of the checkpoint."""

    @property
    def linear(self) -> str:
        """Name of the linear that computes the projection."""
        return PROJECTION_PLACES[self.name][0]

    @property
    def block(self) -> str:
        """Submodule of a decoder layer that holds the projection."""
        return "self_attn" if self.linear in ("qkv", "o") else "mlp"


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear of the decoder; projection i writes out_features[i] columns of its output."""

    name: str
    """qkv, o, gate_up or down"""
    in_features: int
    projections: tuple[str, ...]
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms in the checkpoint; None where the layer has no such norm."""

    attention: str | None = "input_layernorm"
    """Norm of the attention input."""
    mlp: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    """Norm of the attention output before it is added to the residual."""
    after_mlp: str | None = None

    @property
    def count(self) -> int:
        names = (self.attention, self.mlp, self.after_attention, self.after_mlp)
        return sum(name is not None for name in names)


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
    norm_names: NormNames = NormNames()
    norm_plus_one: bool = False
    """Whether the checkpoint stores norm weights minus one."""
    num_labels: int = 0
    """Outputs of the classification head that the model has instead of one over its vocabulary."""
    quantisation: str = ""
    """Formats of the checkpoint's weights in words; empty if they are in floating point."""
    folded_scales: Literal["none", "unknown", "known"] = "none"
    """Whether the quantiser divided norms by scales; known: adapters are fitted to them."""
    path_prefixes: tuple[str, ...] = (TEXT_PREFIX,)
    """Prefixes of module paths under which adapters may address the layers; the first is that of
    `targets`."""

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

    def kv_layout(self, block_tokens: int, dtype: str) -> KVLayout:
        """The layout of KV pages that hold block_tokens tokens each."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_tokens, dtype)


def fuse_projections(projections: Iterable[Projection]) -> tuple[FusedLinear, ...]:
    """The fused linears of a decoder layer that has these projections."""
    members: dict[str, list[Projection]] = {name: [] for name in LINEARS}
    for projection in projections:
        members[projection.linear].append(projection)
    return tuple(
        FusedLinear(
            name=name,
            in_features=found[0].in_features,
            projections=tuple(projection.name for projection in found),
            out_features=tuple(projection.out_features for projection in found),
        )
        for name, found in members.items()
        if found
    )


@lru_cache(maxsize=8)
def _targets(num_layers: int, projections: tuple[Projection, ...]) -> tuple[TargetModule, ...]:
    return tuple(
        TargetModule(
            path=f"{TEXT_PREFIX}layers.{layer}.{projection.block}.{projection.name}",
            layer=layer,
            projection=projection.name,
            in_features=projection.in_features,
            out_features=projection.out_features,
        )
        for layer in range(num_layers)
        for projection in projections
    )
