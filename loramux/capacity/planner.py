"""Plans adapter memory: sizes, the adapters that fit in each tier, and hit rates. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from loramux.adapters.packed.dense import IMAGE_HEADER_BYTES, plan_dense
from loramux.adapters.packed.paged import (
    BLOCKS_PER_ADAPTER,
    MAX_DEVICE_ADAPTERS,
    RANK_BLOCK,
    plan_rank_blocks,
    uses_fp12,
)
from loramux.capacity.advice import advise
from loramux.capacity.plan import (
    DEFAULT_KV_TOKENS,
    AdapterSize,
    BaseSizes,
    Budgets,
    Eviction,
    Fleet,
    GpuMemory,
    HitRate,
    MeasuredAdapter,
    MemoryPlan,
    PlannedBase,
    Tier,
    TierPlan,
)
from loramux.types.model import LinearSpec

MAX_EXACT_RANK = 256
Array = np.ndarray[Any, np.dtype[np.float64]]
MAX_STEPS = 100
PRECISION = 1e-9


def plan_memory(
    base: PlannedBase, fleet: Fleet, budgets: Budgets, *, gpu: GpuMemory | UnsetType = UNSET
) -> MemoryPlan:
    """Plans the tiers for a fleet of adapters."""
    num_pages = budgets.device_bytes // base.page_bytes
    kv_tokens = _reserved_tokens(base, budgets, num_pages)
    by_member = _sizes(base, fleet)
    sizes = list(by_member.values())
    members = [by_member[member] for member in fleet.measured or fleet.ranks]
    caches = _caches(base, fleet, budgets, sizes=members, kv_tokens=kv_tokens)
    tiers = _tier_plans(fleet, caches)
    device = tiers[0]
    plan = MemoryPlan(
        base=_base_sizes(base),
        gpu=gpu,
        adapters=fleet.num_adapters,
        targets=list(fleet.targets),
        zipf=fleet.zipf,
        sizes=sizes,
        tiers=tiers,
        kv_tokens_reserved=kv_tokens,
        kv_tokens_left=num_pages * base.block_tokens
        - device.used_bytes // base.page_bytes * base.block_tokens,
        evicted=Eviction(
            adapters=fleet.num_adapters - device.adapters,
            zipf_share=_rounded(1 - device.zipf.ideal),
            uniform_share=_rounded(1 - device.uniform.ideal),
        ),
        advice=[],
    )
    return msgspec.structs.replace(plan, advice=advise(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TierSizes:
    tier: Tier
    budget_bytes: int | None
    room_bytes: int | None
    needed_bytes: int
    sizes: Array
    """The size of each adapter in this tier, the most popular first."""
    max_adapters: int | None = None

    @property
    def capacity(self) -> float:
        room = math.inf if self.room_bytes is None else self.room_bytes
        if self.max_adapters is None:
            return room
        return min(room, float(self.sizes[: self.max_adapters].sum()))


def _caches(
    base: PlannedBase,
    fleet: Fleet,
    budgets: Budgets,
    *,
    sizes: Sequence[AdapterSize],
    kv_tokens: int,
) -> list[_TierSizes]:
    host_sizes = _repeated([size.bytes for size in sizes], fleet.num_adapters)
    disk_sizes = _repeated([size.disk_bytes for size in sizes], fleet.num_adapters)
    page_sizes = _repeated([size.device_bytes for size in sizes], fleet.num_adapters)
    device = _TierSizes(
        tier="device",
        budget_bytes=budgets.device_bytes,
        room_bytes=_device_room_bytes(base, budgets, kv_tokens),
        needed_bytes=_needed_device_bytes(base, budgets, int(page_sizes.sum())),
        sizes=page_sizes,
        max_adapters=_max_device_adapters(base, fleet, budgets),
    )
    others: tuple[tuple[Tier, int | None, Array], ...] = (
        ("host", budgets.host_bytes, host_sizes),
        ("disk", budgets.disk_bytes, disk_sizes),
        ("source", None, host_sizes),
    )
    return [device] + [
        _TierSizes(
            tier=tier, budget_bytes=b, room_bytes=b, needed_bytes=int(each.sum()), sizes=each
        )
        for tier, b, each in others
    ]


def _max_device_adapters(base: PlannedBase, fleet: Fleet, budgets: Budgets) -> int | None:
    """Return the limit of the GPU's tables of adapters, or None on a CPU."""
    if base.packing != "paged":
        return None
    most = min(MAX_DEVICE_ADAPTERS, budgets.device_bytes // base.page_bytes)
    # A higher rank is cut into blocks of at most RANK_BLOCK ranks.
    blocks = [math.ceil(rank / RANK_BLOCK) * len(fleet.targets) for rank in fleet.ranks]
    blocks = [adapter.num_blocks for adapter in fleet.measured] or blocks
    return min(most, int(most * BLOCKS_PER_ADAPTER * len(blocks) / max(1, sum(blocks))))


def _device_room_bytes(base: PlannedBase, budgets: Budgets, kv_tokens: int) -> int:
    num_pages = budgets.device_bytes // base.page_bytes
    num_kv_pages = math.ceil(kv_tokens / base.block_tokens)
    room = min(num_pages - num_kv_pages, int(budgets.adapter_fraction * num_pages))
    return max(0, room) * base.page_bytes


def _needed_device_bytes(base: PlannedBase, budgets: Budgets, adapter_bytes: int) -> int:
    """Return the smallest pool for all adapters and the KV tokens it would reserve."""
    if budgets.kv_tokens is not None:
        num_kv_pages = math.ceil(budgets.kv_tokens / base.block_tokens)
    else:
        most = math.ceil(DEFAULT_KV_TOKENS / base.block_tokens)
        num_kv_pages = min(most, adapter_bytes // base.page_bytes)
    num_pages = max(
        adapter_bytes // base.page_bytes + num_kv_pages,
        math.ceil(adapter_bytes / budgets.adapter_fraction / base.page_bytes),
    )
    return num_pages * base.page_bytes


def _tier_plans(fleet: Fleet, caches: Sequence[_TierSizes]) -> list[TierPlan]:
    """Return the plan of each tier; its hit rate excludes the hits of faster tiers."""
    by_zipf = _hit_rates(zipf_shares(fleet.num_adapters, fleet.zipf), caches)
    by_uniform = _hit_rates(zipf_shares(fleet.num_adapters, 0.0), caches)
    plans = []
    for cache, zipf, uniform in zip(caches, by_zipf, by_uniform, strict=True):
        fits = num_kept(cache.sizes, cache.capacity)
        plans.append(
            TierPlan(
                tier=cache.tier,
                budget_bytes=cache.budget_bytes,
                room_bytes=cache.room_bytes,
                needed_bytes=cache.needed_bytes,
                used_bytes=int(cache.sizes[:fits].sum()),
                adapters=fits,
                zipf=zipf,
                uniform=uniform,
            )
        )
    return plans


def _hit_rates(shares: Array, caches: Sequence[_TierSizes]) -> list[HitRate]:
    rates = []
    ideal = lru = 0.0
    for cache in caches:
        best = max(ideal, ideal_hit_rate(shares, cache.sizes, cache.capacity))
        recent = max(lru, lru_hit_rate(shares, cache.sizes, cache.capacity))
        rates.append(HitRate(ideal=_rounded(best - ideal), lru=_rounded(recent - lru)))
        ideal, lru = best, recent
    return rates


def _sizes(base: PlannedBase, fleet: Fleet) -> dict[MeasuredAdapter | int, AdapterSize]:
    """Return the size of each distinct adapter, in the order of their first turn."""
    if not fleet.measured:
        return {rank: _adapter_size(base, fleet, rank) for rank in dict.fromkeys(fleet.ranks)}
    return {
        adapter: AdapterSize(
            rank=adapter.rank,
            count=_count(fleet, fleet.measured, adapter),
            bytes=adapter.num_bytes,
            disk_bytes=adapter.disk_bytes,
            pages=adapter.num_pages(base),
            device_bytes=adapter.num_pages(base) * base.page_bytes,
            name=adapter.name,
            parts=list(adapter.parts) or UNSET,
        )
        for adapter in dict.fromkeys(fleet.measured)
    }


def _count(fleet: Fleet, members: Sequence[object], member: object) -> int:
    """Return how many of the adapters are of one of the members, which take turns."""
    rounds, rest = divmod(fleet.num_adapters, len(members))
    return rounds * members.count(member) + members[:rest].count(member)


def _adapter_size(base: PlannedBase, fleet: Fleet, rank: int) -> AdapterSize:
    sites = base.shapes.linears
    if base.packing == "paged":
        num_elements = _paged_elements(base, sites, fleet, rank)
    else:
        ranks = {(layer, t): rank for layer in range(base.shapes.num_layers) for t in fleet.targets}
        num_elements = plan_dense(sites, ranks).num_elements
    num_bytes = num_elements * base.element_bytes
    pages = math.ceil(num_bytes / base.page_bytes)
    return AdapterSize(
        rank=rank,
        count=_count(fleet, fleet.ranks, rank),
        bytes=num_bytes,
        disk_bytes=num_bytes + IMAGE_HEADER_BYTES,
        pages=pages,
        device_bytes=pages * base.page_bytes,
    )


def _paged_elements(
    base: PlannedBase, sites: tuple[LinearSpec, ...], fleet: Fleet, rank: int
) -> int:
    """Return the size of an adapter in rank blocks.

    It is exact up to MAX_EXACT_RANK; the pages of a higher rank are those of several lower ones,
    because the time of the layout grows with the rank.
    """
    is_fp12 = uses_fp12((site.in_features for site in sites), base.dtype, base.page_width)
    whole, rest = divmod(rank, MAX_EXACT_RANK)
    return sum(
        num_parts
        * _rank_block_elements(
            sites, base.shapes.num_layers, fleet.targets, part, base.page_width, is_fp12
        )
        for num_parts, part in ((whole, MAX_EXACT_RANK), (1, rest))
        if num_parts and part
    )


@lru_cache(maxsize=4 * MAX_EXACT_RANK)
def _rank_block_elements(
    sites: tuple[LinearSpec, ...],
    num_layers: int,
    targets: tuple[str, ...],
    rank: int,
    page_width: int,
    is_fp12: bool,
) -> int:
    ranks = {(layer, target): rank for layer in range(num_layers) for target in targets}
    return plan_rank_blocks(sites, ranks, page_width, is_fp12=is_fp12).num_elements


def _base_sizes(base: PlannedBase) -> BaseSizes:
    return BaseSizes(
        name=base.name,
        dtype=base.dtype,
        num_layers=base.shapes.num_layers,
        weight_bytes=base.weight_bytes,
        quantisation=base.shapes.quantisation,
        kv_dtype=base.kv.dtype,
        kv_token_bytes=base.kv_token_bytes,
        block_tokens=base.block_tokens,
        page_bytes=base.page_bytes,
        packing=base.packing,
    )


def _reserved_tokens(base: PlannedBase, budgets: Budgets, num_pages: int) -> int:
    if budgets.kv_tokens is not None:
        return budgets.kv_tokens
    return min(DEFAULT_KV_TOKENS, num_pages * base.block_tokens // 2)


def _repeated(sizes: Sequence[int], num_adapters: int) -> Array:
    return np.resize(np.array(sizes, dtype=np.float64), num_adapters)


def _rounded(share: float) -> float:
    return max(0.0, round(share, 6))


def zipf_shares(num_adapters: int, exponent: float) -> Array:
    """Return the fraction of requests for each adapter, proportional to 1 / i ** exponent."""
    weights: Array = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    shares: Array = weights / weights.sum()
    return shares


def num_kept(sizes: Array, capacity: float) -> int:
    """Return how many adapters fit, in order of popularity."""
    return int(np.searchsorted(np.cumsum(sizes), capacity, side="right"))


def ideal_hit_rate(shares: Array, sizes: Array, capacity: float) -> float:
    """Return the hit rate of a cache that keeps the most popular adapters."""
    return float(shares[: num_kept(sizes, capacity)].sum())


def lru_hit_rate(shares: Array, sizes: Array, capacity: float) -> float:
    """Return the hit rate of an LRU cache by Che's approximation for independent requests.

    An item stays if it is requested again within the characteristic time T, which is the same for
    all items; T is the time for which the expected content fills the cache.
    """
    kept = num_kept(sizes, capacity)
    if kept == len(sizes):
        return 1.0
    filled = float(sizes[:kept].sum())
    time = 0.0
    # The expected content is a concave function of T, so Newton's method from below converges.
    for _ in range(MAX_STEPS):
        absent = np.exp(-shares * time)
        missing = filled - float((1 - absent) @ sizes)
        if missing <= PRECISION * filled:
            break
        time += missing / float((shares * absent) @ sizes)
    return float((1 - np.exp(-shares * time)) @ shares)
