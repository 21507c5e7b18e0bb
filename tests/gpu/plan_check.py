"""Compare `loramux plan` with an engine that loads such adapters.

    python -m tests.gpu.plan_check [--model CONFIG] [--gpu h200] [--device NAME]

For three ranks and target sets it registers an adapter and compares its bytes and pages with the
plan; then it loads adapters until no more fit and compares their number. It exits with status 1 if
any of these differ. The page pool is compared too, but the plan's is an estimate. Weights are
random; on a CPU, LORAMUX_KERNELS=triton builds the engine with the layout of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_weights import (
    SHAPES,
    RandomAdapters,
    llama_settings,
    make_adapter,
    random_model,
)
from loramux.capacity.gpus import GpuSettings, gpu_total_bytes, plan_gpu_memory
from loramux.capacity.plan import Budgets, Fleet, MemoryPlan, PlannedBase, parse_targets
from loramux.capacity.planner import plan_memory
from loramux.config.engine import EngineConfig, ResolvedConfig
from loramux.engine.build import build_engine
from loramux.engine.engine import Engine
from loramux.memory.device import device_memory_bytes
from loramux.models.architectures import base_info, parse_config
from loramux.models.dtypes import resolve_dtype
from loramux.runner.device_choice import resolve_config
from loramux.types.model import BaseModelInfo

HOST_BYTES = 2**50
"""Host memory without a limit: the adapters that fill the pool share a few buffers."""


@dataclass(frozen=True)
class Kind:
    rank: int
    sites: str
    """qkvo or all: the target sets of RandomAdapters."""

    def targets(self, base: BaseModelInfo) -> tuple[str, ...]:
        return parse_targets(["all" if self.sites == "all" else "attention"], base)


KINDS = (Kind(8, "qkvo"), Kind(16, "all"), Kind(64, "all"))


def planned_base(engine: Engine, config: ResolvedConfig) -> PlannedBase:
    return PlannedBase(
        name="random",
        shapes=engine.catalog.base,
        dtype=str(engine.executor.dtype).removeprefix("torch."),
        block_tokens=config.block_tokens,
        packing="paged" if config.wants_device_kernels else "dense",
    )


def plan_of(base: PlannedBase, kind: Kind, pool_bytes: int) -> MemoryPlan:
    fleet = Fleet(num_adapters=100_000, ranks=(kind.rank,), targets=kind.targets(base.shapes))
    return plan_memory(base, fleet, Budgets(device_bytes=pool_bytes, kv_tokens=0))


def check_kind(
    engine: Engine, config: ResolvedConfig, kind: Kind, folder: Path
) -> list[tuple[str, int, int]]:
    """(quantity, plan, engine) of one kind of adapter."""
    plan = plan_of(planned_base(engine, config), kind, engine.executor.pool_bytes)
    [size] = plan.sizes
    path = make_adapter(
        folder / f"r{kind.rank}-{kind.sites}",
        engine.catalog.base,
        rank=kind.rank,
        seed=kind.rank,
        projections=kind.targets(engine.catalog.base),
        dtype=torch.bfloat16,
    )
    card = engine.register_adapter(path)
    assert engine.residency.load_now([card.cid]), "a single adapter does not fit"
    num_pages = len(engine.memory.placement.device[card.cid].page_ids)
    engine.residency.release([card.cid])
    assert engine.forget_adapter(card.cid)
    return [
        ("bytes of an adapter", size.bytes, card.num_bytes),
        ("pages of an adapter", size.pages, num_pages),
        ("adapters that fit", plan.tier("device").adapters, num_loaded(engine, kind)),
    ]


def num_loaded(engine: Engine, kind: Kind) -> int:
    """Load adapters, which stay leased, until no more fit; then free them and return how many."""
    adapters = RandomAdapters(engine, num_images=2)
    cids: list[str] = []
    while True:
        cids += adapters.add([kind.rank], kind.sites)
        if not engine.residency.load_now([cids[-1]]):
            break
    engine.residency.release(cids[:-1])
    adapters.forget(cids)
    return len(cids) - 1


def estimated_pool(base: PlannedBase, config: ResolvedConfig, gpu: str | None) -> int:
    total = device_memory_bytes(torch.device(config.device))[1]
    settings = GpuSettings(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        augmented_ranks=config.lora_augmented_ranks,
        utilization=config.gpu_memory_utilization,
    )
    total = total if gpu is None else gpu_total_bytes(gpu)
    return plan_gpu_memory(gpu or config.device, total, base, settings).pool_bytes


def make_engine(
    shape: dict[str, Any], device: str, **settings: Any
) -> tuple[Engine, ResolvedConfig]:
    config, _ = resolve_config(
        EngineConfig(device=device, host_memory_bytes=HOST_BYTES, **settings)
    )
    shapes = base_info(parse_config(llama_settings(shape)), "random")
    dtype = resolve_dtype(config.dtype, config.device, num_parameters=shapes.num_parameters)
    model = random_model(shape, dtype, std=0.02, device=config.device)
    return build_engine(model, config), config


def check(engine: Engine, config: ResolvedConfig, kinds: Sequence[Kind] = KINDS) -> int:
    """Print plan and engine for each kind of adapter and return how many values differ."""
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            for name, planned, found in check_kind(engine, config, kind, Path(folder)):
                num_wrong += planned != found
                verdict = "equal" if planned == found else "DIFFERENT"
                print(
                    f"rank {kind.rank:3}, {kind.sites:5} {name:20} plan {planned:>12,} "
                    f"engine {found:>12,} {verdict}",
                    flush=True,
                )
    return num_wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="config.json, or one of " + ", ".join(SHAPES))
    parser.add_argument("--gpu", help="compare the pool with that of this GPU of the table")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device-memory", type=int, metavar="MiB", help="size of the page pool")
    arguments = parser.parse_args()
    name = arguments.model or "llama-3.1-8b"
    shape = SHAPES[name] if name in SHAPES else json.loads(Path(name).read_text())
    memory = None if arguments.device_memory is None else arguments.device_memory * 2**20
    engine, config = make_engine(
        shape, arguments.device, dtype=arguments.dtype, device_memory_bytes=memory
    )
    num_wrong = check(engine, config)
    pool_bytes = engine.executor.pool_bytes
    base = planned_base(engine, config)
    print(f"page: plan {base.page_bytes:,} bytes, engine {pool_bytes // engine.pages.num_pages:,}")
    if config.is_gpu and memory is None:
        estimate = estimated_pool(base, config, arguments.gpu)
        print(
            f"page pool: plan {estimate / 2**30:.2f} GiB (estimate), engine "
            f"{pool_bytes / 2**30:.2f} GiB: {estimate / pool_bytes - 1:+.2%}"
        )
    engine.close()
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
