"""Derives advice from a memory plan: which flags to change for better hit rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import UNSET

from loramux.capacity.plan import MemoryPlan, TierPlan

MIN_KV_TOKENS = 2048
MIN_MIXED_ADAPTERS = 8
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def advise(plan: MemoryPlan) -> list[str]:
    """Return sentences of advice; those that name a flag give a sufficient value."""
    return [*_device(plan), *_host(plan), *_disk(plan), *_kv(plan)]


def flag_size(num_bytes: int) -> str:
    """Round a size up and format it as the flags expect it."""
    for unit, size in UNITS:
        if num_bytes >= size:
            return f"{math.ceil(num_bytes / size * 10) / 10:g}{unit}"
    return str(num_bytes)


def _device(plan: MemoryPlan) -> Iterator[str]:
    device = plan.tier("device")
    if device.adapters == plan.adapters:
        yield f"All {plan.adapters} adapters fit on the device: each is loaded once."
        return
    share = f"{plan.evicted.zipf_share:.1%}"
    largest = max(plan.sizes, key=lambda size: size.device_bytes)
    if largest.device_bytes > (device.budget_bytes or 0):
        yield (
            f"One adapter of rank {largest.rank} takes {flag_size(largest.device_bytes)}, more "
            "than the whole pool: it cannot be served."
        )
    needed = flag_size(device.needed_bytes)
    waiting = f"{share} of the requests wait for a load."
    if plan.gpu is UNSET:
        yield (
            f"Raise --device-memory to {needed} to keep all {plan.adapters} adapters on the "
            f"device; now {waiting}"
        )
    else:
        yield (
            f"All {plan.adapters} adapters need a page pool of {needed}, and this GPU has "
            f"{flag_size(plan.gpu.pool_bytes)}; {waiting}"
        )
    if device.adapters < min(plan.adapters, MIN_MIXED_ADAPTERS):
        yield f"No batch can mix more than {device.adapters} adapters: no more fit at once."
    yield from _smaller_rank(plan, device)


def _smaller_rank(plan: MemoryPlan, device: TierPlan) -> Iterator[str]:
    # Only in the dense layout is the size proportional to the rank.
    if len(plan.sizes) > 1 or plan.base.packing != "dense":
        return
    [size] = plan.sizes
    if size.parts is not UNSET and [part.kind for part in size.parts] != ["low rank"]:
        return
    pages_each = (device.room_bytes or 0) // plan.base.page_bytes // plan.adapters
    rank = pages_each * plan.base.page_bytes * size.rank // size.bytes
    if rank >= 1:
        yield f"Or use adapters of rank {rank} or less: all of them would fit."


def _host(plan: MemoryPlan) -> Iterator[str]:
    device, host = plan.tier("device"), plan.tier("host")
    largest = max(plan.sizes, key=lambda size: size.bytes)
    if largest.bytes > (host.budget_bytes or 0):
        yield (
            f"Every load goes through host memory, and an adapter of rank {largest.rank} takes "
            f"more than the budget: --host-memory must be {flag_size(largest.bytes)} at least."
        )
    if device.adapters == plan.adapters:
        return
    if 0 < host.adapters <= device.adapters:
        yield (
            f"The host tier has room for {host.adapters} adapters, no more than the "
            f"{device.adapters} of the device: it saves nothing."
        )
    if host.adapters < plan.adapters:
        yield (
            f"Raise --host-memory to {flag_size(host.needed_bytes)}, and every load becomes a "
            "copy within memory."
        )


def _disk(plan: MemoryPlan) -> Iterator[str]:
    disk, source = plan.tier("disk"), plan.tier("source")
    held = max(plan.tier("device").adapters, plan.tier("host").adapters)
    if held == plan.adapters:
        return
    if 0 < disk.adapters <= held:
        yield (
            f"The disk tier has room for {disk.adapters} adapters, no more than the memory "
            f"above it ({held}): it saves nothing."
        )
    if disk.adapters < plan.adapters:
        yield (
            f"Raise --disk-space to {flag_size(disk.needed_bytes)}: "
            f"{source.zipf.ideal:.1%} of the requests would read their adapter from its source."
        )


def _kv(plan: MemoryPlan) -> Iterator[str]:
    if plan.kv_tokens_left < MIN_KV_TOKENS:
        wanted = MIN_KV_TOKENS * plan.base.kv_token_bytes
        yield (
            f"Only {plan.kv_tokens_left} tokens of KV cache are left: {MIN_KV_TOKENS} take "
            f"{flag_size(wanted)}."
        )
