"""LoRA kernels in steps as S-LoRA's trace makes them: many adapters, a row or two of each.

    python3 -m benchmarks.gpu_lora_uniform

256 decoding rows over 1,000 adapters of ranks 8 to 64 on q,k,v,o, alone and with prompts behind
them; Llama-3.1-8B shapes, microseconds per decoder layer in a CUDA graph over several layers.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_lora_kernels import (
    NUM_LAYERS,
    PROJECTIONS,
    SITE_INDICES,
    SITES,
    Layer,
    World,
    add_lora,
    device_launch,
    print_table,
    time_base,
    time_graph,
)
from benchmarks.workloads import SLORA_RANKS
from loramux.kernels.gpu.lora import segmented as lora_triton
from loramux.kernels.gpu.lora.work_list import gather_tiles

# Rows of the prompts that stand behind 256 decoding rows.
PROMPTS: tuple[tuple[int, ...], ...] = ((), (64,), (170,), (250, 120))


def run_uniform() -> list[dict[str, Any]]:
    chance = random.Random(1)
    rows = []
    for prompts in PROMPTS:
        asked = Counter(chance.randrange(1000) for _ in range(256))
        counts = [asked[adapter] for adapter in sorted(asked)] + list(prompts)
        ranks = [SLORA_RANKS[adapter % 4] for adapter in sorted(asked)]
        ranks += [SLORA_RANKS[(place + 2) % 4] for place in range(len(prompts))]
        rows.append(time_uniform(ranks, counts))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def time_uniform(ranks: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """counts[i] neighbouring rows of an adapter of ranks[i]."""
    num_rows, num_layers = sum(counts), NUM_LAYERS // 2
    world = World(ranks, PROJECTIONS[:4], num_layers=num_layers)
    layer = Layer(num_rows, num_layers)
    limits = world.limits(max_items=4096, max_h_rows=16384)
    slots = [((slot, 1.0),) for slot in range(len(ranks))]
    tables = world.tables(
        gather_tiles(slots, counts, limits.tile_rows),
        device_launch(),
        limits,
    )
    attention = [(at, site) for at in range(num_layers) for site in SITE_INDICES["qkvo"]]

    def both() -> None:
        for at in range(num_layers):
            for site in range(len(SITES)):
                layer.base(at, site)
                if site in SITE_INDICES["qkvo"]:
                    add_lora(tables, world, layer, at, site)

    def shrinks() -> None:
        for at, site in attention:
            lora_triton.shrink(tables, world.pool, layer.x[site], at, site)

    def expands() -> None:
        for at, site in attention:
            lora_triton.expand(tables, world.pool, layer.y[site], at, site)

    base_us = time_base(layer)
    both_us, shrink_us, expand_us = (
        time_graph(run) / num_layers for run in (both, shrinks, expands)
    )
    sites = [SITES[site] for site in SITE_INDICES["qkvo"]]
    width = sum(s.in_features * len(s.out_features) + sum(s.out_features) for s in sites)
    return {
        "rows": num_rows,
        "adapters": len(ranks),
        "MB": 2e-6 * width * sum(ranks),
        "base": base_us,
        "shrink": shrink_us,
        "expand": expand_us,
        "added": both_us - base_us,
    }


if __name__ == "__main__":
    print_table(run_uniform())
