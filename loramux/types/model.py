"""Shapes of a base model: its linear layers and the geometry of its KV cache, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from loramux.types.kv import KVLayout

PackingKind = Literal["dense", "paged"]
"""The layout of adapter weights: dense matrices on a CPU, rank blocks in pages on a GPU."""
TEXT_PREFIX = "model."
"""Prefix of the decoder's module paths in the checkpoint of a text model."""
ATTENTION_BLOCK, MLP_BLOCK = "self_attn", "mlp"
"""Submodules of a decoder layer that hold its projections."""


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
    """A linear layer of the checkpoint: some rows of the weight of a decoder's linear."""

    name: str
    in_features: int
    out_features: int
    start: int = 0
    """Its first row in the weight of its linear."""
    row_map: RowMap | None = None
    """None: the engine keeps the order of the checkpoint."""

    @property
    def rows(self) -> slice:
        """Its rows in the weight of its linear."""
        return slice(self.start, self.start + self.out_features)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear of a decoder layer, which computes projections that read the same input at once.

    Its position among the linears of a model is its index as a LoRA site.
    """

    name: str
    in_features: int
    projections: tuple[str, ...]
    """Names of the linear layers of the checkpoint whose rows are in its weight, in this order."""
    out_features: tuple[int, ...]
    """Outputs of each projection."""
    block: str = MLP_BLOCK
    """Submodule of a decoder layer that holds the projections in the checkpoint."""
    has_bias: bool = False
    is_added: bool = False
    """The output is added to the residual stream."""
    is_gated: bool = False
    """The first half of the outputs is the gate of the second."""
    row_maps: tuple[RowMap | None, ...] = ()
    """Row order of each projection; empty: the engine keeps that of the checkpoint."""
    expert: int | None = None
    """The expert that the linear belongs to, so that some tokens alone pass through it; None: all
    tokens do."""

    @property
    def num_outputs(self) -> int:
        return sum(self.out_features)

    @property
    def columns(self) -> dict[str, slice]:
        """The output columns of each projection."""
        return {projection.name: projection.rows for projection in self.members}

    @property
    def members(self) -> tuple[Projection, ...]:
        starts = accumulate(self.out_features, initial=0)
        row_maps = self.row_maps or (None,) * len(self.projections)
        return tuple(
            Projection(name, self.in_features, size, start, row_map)
            for name, size, start, row_map in zip(
                self.projections, self.out_features, starts, row_maps, strict=False
            )
        )


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
    linears: tuple[LinearSpec, ...]
    """The linears of a layer that adapters may change, in the order of the checkpoint."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    tie_embeddings: bool = False
    """Whether the output head is the embedding."""
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
        return self.linears[0].in_features

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections of a layer in the order of the checkpoint."""
        return tuple(projection for linear in self.linears for projection in linear.members)

    @property
    def biased(self) -> frozenset[str]:
        """The projections that have a bias."""
        return frozenset(
            name for linear in self.linears if linear.has_bias for name in linear.projections
        )

    @property
    def targets(self) -> tuple[TargetModule, ...]:
        """The projections of every layer, layer by layer."""
        return _targets(self.num_layers, self.linears)

    def kv_layout(self, block_tokens: int, dtype: str) -> KVLayout:
        """Return the layout of KV pages that hold block_tokens tokens each."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_tokens, dtype)


@lru_cache(maxsize=8)
def _targets(num_layers: int, linears: tuple[LinearSpec, ...]) -> tuple[TargetModule, ...]:
    return tuple(
        TargetModule(
            path=f"{TEXT_PREFIX}layers.{layer}.{linear.block}.{projection.name}",
            layer=layer,
            projection=projection.name,
            in_features=projection.in_features,
            out_features=projection.out_features,
        )
        for layer in range(num_layers)
        for linear in linears
        for projection in linear.members
    )
