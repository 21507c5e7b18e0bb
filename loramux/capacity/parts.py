"""Sizes of an adapter by the kinds of its parts: bytes in the pool, pages, bytes read per token.

The layouts are those of the pool (adapters/packed), so that pages are exact. No torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from loramux.adapters.packed.dense import DenseLayout, plan_dense
from loramux.adapters.packed.extras import EMBEDDING, ExtraKind, ExtraSpec
from loramux.adapters.packed.paged import (
    RANK_BLOCK,
    ModuleKey,
    RankBlockLayout,
    plan_rank_blocks,
    uses_fp12,
)
from loramux.capacity.plan import MeasuredAdapter, PartSize, PlannedBase

LOW_RANK = "low rank"
FULL_WEIGHT = "full weight"
KIND_NAMES: dict[ExtraKind, str] = {
    ExtraKind.GAIN: "gain",
    ExtraKind.BIAS: "bias",
    ExtraKind.WEIGHT: FULL_WEIGHT,
    ExtraKind.LOW_RANK_A: "low rank of embedding or head",
    ExtraKind.LOW_RANK_B: "low rank of embedding or head",
    ExtraKind.ROWS: "token rows",
}
COMPARED_RANK = 16


def plan_layout(
    base: PlannedBase, ranks: Mapping[ModuleKey, int], extras: Sequence[ExtraSpec] = ()
) -> DenseLayout | RankBlockLayout:
    """Return the layout in the pool of an adapter with these ranks and parts.

    Raises DoesNotFit for a part whose rows are larger than a page.
    """
    sites = base.shapes.linears
    if base.packing == "dense":
        return plan_dense(sites, dict(ranks)).with_extras(extras, base.page_width)
    is_fp12 = uses_fp12((site.in_features for site in sites), base.dtype, base.page_width)
    low_rank = plan_rank_blocks(sites, ranks, base.page_width, is_fp12=is_fp12)
    return low_rank.with_extras(extras)


def measure_adapter(
    base: PlannedBase,
    name: str,
    ranks: Mapping[ModuleKey, int],
    extras: Sequence[ExtraSpec] = (),
) -> MeasuredAdapter:
    """Return the size of an adapter with these ranks by (layer, projection) and parts."""
    layout = plan_layout(base, ranks, extras)
    if isinstance(layout, DenseLayout):
        low_rank_elements = layout.low_rank_elements
    else:
        low_rank_elements = layout.num_weights - layout.extras.num_weights
    num_bytes = low_rank_elements * base.element_bytes
    parts = [
        PartSize(
            kind=LOW_RANK,
            modules=sum(rank > 0 for rank in ranks.values()),
            bytes=num_bytes,
            token_bytes=num_bytes,
        )
    ]
    return MeasuredAdapter(
        name=name,
        rank=layout.max_rank,
        num_bytes=layout.num_elements * base.element_bytes,
        parts=(*(parts if ranks else ()), *_extra_sizes(base, extras)),
        num_blocks=_blocks_per_layer(ranks),
    )


def low_rank_bytes(base: PlannedBase, projection: str, rank: int) -> int:
    """Return the size in the pool, without padding, of the low rank of one projection."""
    return sum(part.bytes for part in measure_adapter(base, "", {(0, projection): rank}).parts)


def base_token_bytes(base: PlannedBase) -> int:
    """Return the bytes of the base that a decode step reads for a token: all but the embedding."""
    shapes = base.shapes
    lookup = 0 if shapes.tie_embeddings else shapes.vocab_size * shapes.hidden_size
    return (shapes.num_parameters - lookup) * base.element_bytes


def full_module_warnings(base: PlannedBase, adapter: MeasuredAdapter) -> Iterator[str]:
    """Yield what the full weights of an adapter cost, if it has any."""
    for part in adapter.parts:
        if part.kind != FULL_WEIGHT:
            continue
        modules = "1 module" if part.modules == 1 else f"{part.modules} modules"
        times = part.bytes / max(1, _compared_bytes(base))
        share = part.token_bytes / max(1, base_token_bytes(base))
        yield (
            f"{adapter.name} replaces the full weight of {modules}: {part.bytes / 2**20:.1f} MiB "
            f"of its {adapter.num_bytes / 2**20:.1f} MiB in the pool, {times:.1f} times an adapter "
            f"of rank {COMPARED_RANK} on all linears. Each of its tokens reads "
            f"{part.token_bytes / 2**20:.1f} MiB more, {share:.1%} of what it reads of the base."
        )


def _extra_sizes(base: PlannedBase, extras: Sequence[ExtraSpec]) -> Iterator[PartSize]:
    by_kind: dict[str, list[ExtraSpec]] = defaultdict(list)
    for spec in extras:
        by_kind[KIND_NAMES[spec.kind]].append(spec)
    for kind, specs in by_kind.items():
        num_weights = sum(spec.num_rows * spec.width for spec in specs)
        num_read = sum(map(_elements_per_token, specs))
        yield PartSize(
            kind=kind,
            modules=len({(spec.layer, spec.module) for spec in specs}),
            bytes=num_weights * base.element_bytes,
            token_bytes=num_read * base.element_bytes,
        )


def _elements_per_token(spec: ExtraSpec) -> int:
    """Return the elements that a token reads: of tables by token, one row."""
    is_lookup = spec.module == EMBEDDING and spec.kind is not ExtraKind.LOW_RANK_B
    return spec.width if is_lookup else spec.num_rows * spec.width


def _blocks_per_layer(ranks: Mapping[ModuleKey, int]) -> int:
    largest: dict[str, int] = {}
    for (_, projection), rank in ranks.items():
        largest[projection] = max(rank, largest.get(projection, 0))
    return sum(math.ceil(rank / RANK_BLOCK) for rank in largest.values())


def _compared_bytes(base: PlannedBase) -> int:
    widths = sum(p.in_features + p.out_features for p in base.shapes.projections)
    return COMPARED_RANK * widths * base.shapes.num_layers * base.element_bytes
