"""Puts an engine together from a model on disk and a config."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loramux.adapters.catalog import AdapterRules
from loramux.adapters.packed.dense import Site, sites_of
from loramux.adapters.packed.packing import DensePacking, Packing, PagedPacking
from loramux.config.engine import EngineConfig, SchedulerConfig
from loramux.engine.engine import Engine
from loramux.engine.memory import Clock, build_memory
from loramux.errors import DoesNotFit
from loramux.kernels.select import select_kernels
from loramux.lora.merge import MergeSource, PageDeltas
from loramux.lora.merge_controller import MergeController
from loramux.memory.device import default_pool_bytes, host_buffer, total_memory_bytes
from loramux.memory.host_buffers import HostBuffers
from loramux.memory.pool import KVGeometry, PagePool
from loramux.models.architectures import DecoderConfig, base_info
from loramux.models.dtypes import resolve_dtype
from loramux.models.loader import LoadedModel, load_model
from loramux.models.packed_linear import pack_linears
from loramux.runner.cpu_runner import CpuRunner
from loramux.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from loramux.engine.build_device import DevicePlan

# What images leave of host memory may be kept for the next ones up to this part of it.
_SPARE_PARTS = 16


def load_base(
    path: Path, config: EngineConfig, *, progress: Callable[[str, float], None] | None = None
) -> LoadedModel:
    def dtype(sizes: DecoderConfig) -> torch.dtype:
        count = base_info(sizes, path.name).num_parameters
        return resolve_dtype(config.dtype, config.device, num_parameters=count)

    model = load_model(path, dtype=dtype, device=config.device, progress=progress)
    packs = config.pack_weights and not config.is_gpu and not config.wants_device_kernels
    if packs and not config.wants_reference_kernels:
        pack_linears(model.decoder, byte_limit=total_memory_bytes() // 4)
    return model


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    clock: Clock = time.monotonic,
    loads: Executor | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Engine:
    """`loads`: where adapters are loaded; None: on threads of the engine's own."""
    base = base_info(model.config, model.name)
    sites = sites_of(base)
    device_plan = _device_plan(model, config, sites) if config.wants_device_kernels else None
    pool = _make_pool(model, config, device_plan, progress)
    rules = AdapterRules(
        base=base,
        packing=_packing(sites, pool, config, for_device=device_plan is not None),
        max_rank=config.max_rank,
        strict_base=config.strict_base,
    )
    directory = None if device_plan is None else device_plan.make_directory(pool)
    memory = build_memory(config, rules, pool, clock=clock, loads=loads, device_table=directory)
    scheduler = Scheduler(
        _scheduler_config(model, config, pool),
        pages=memory.pages,
        reclaimer=memory.reclaimer,
        adapters=memory.residency,
        prefixes=memory.prefixes,
    )
    vocab_size = model.config.vocab_size
    if device_plan is not None and directory is not None:
        from loramux.engine.build_device import prepare

        device_runner = device_plan.make_runner(pool, directory)
        prepare(device_plan, device_runner, progress)
        return Engine(
            scheduler=scheduler, executor=device_runner, memory=memory, vocab_size=vocab_size
        )
    if progress is not None and not config.is_gpu:
        # With numba, 15 to 26 s on two cores at the first start, less than one later.
        progress("Preparing CPU kernels", 0.0)
    runner = CpuRunner(
        decoder=model.decoder,
        site_names=tuple(site.name for site in sites),
        pool=pool,
        adapters=memory.placement.device,
        kernels=select_kernels(
            config.device,
            reference=config.wants_reference_kernels or config.is_gpu,
            dtype=pool.storage.dtype,
            may_compile=config.may_compile_kernels,
        ),
    )
    return Engine(
        scheduler=scheduler,
        executor=runner,
        memory=memory,
        vocab_size=vocab_size,
        merge=_merge_controller(config, runner, PageDeltas(memory.placement.device, pool)),
    )


def _packing(
    sites: tuple[Site, ...], pool: PagePool, config: EngineConfig, *, for_device: bool
) -> Packing:
    dtype = pool.storage.dtype
    allocate = host_buffer(pool.device)
    if not for_device:
        if pool.device.type == "cpu":
            budget_bytes = config.host_memory_bytes
            allocate = HostBuffers(
                spare_bytes=budget_bytes // _SPARE_PARTS, budget_bytes=budget_bytes
            ).allocate
        return DensePacking(sites, dtype, allocate)
    return PagedPacking(sites, dtype, pool.geometry.page_elements, allocate)


def _merge_controller(
    config: EngineConfig, runner: CpuRunner, deltas: PageDeltas
) -> MergeController | None:
    if config.merge == "off":
        return None
    byte_limit = config.merge_memory_bytes
    return MergeController(
        runner.lora,
        MergeSource(bases=runner.lora.bases, deltas=deltas),
        byte_limit=total_memory_bytes() // 4 if byte_limit is None else byte_limit,
    )


def _geometry(model: LoadedModel, config: EngineConfig) -> KVGeometry:
    return KVGeometry(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_tokens=config.block_tokens,
    )


def _device_plan(model: LoadedModel, config: EngineConfig, sites: tuple[Site, ...]) -> DevicePlan:
    from loramux.engine.build_device import DevicePlan
    from loramux.models.augmented_linear import RANK_BLOCK, augment_linears
    from loramux.runner.gpu_runner import BatchLimits

    if config.lora_augmented_ranks:
        # Before anything is measured: it is part of the weights.
        augment_linears(model.decoder, config.lora_augmented_ranks // RANK_BLOCK)
    limits = BatchLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_pages=-(-_max_model_len(model, config) // config.block_tokens),
    )
    return DevicePlan(model, sites, _geometry(model, config), limits)


def _make_pool(
    model: LoadedModel,
    config: EngineConfig,
    device_plan: DevicePlan | None,
    progress: Callable[[str, float], None] | None,
) -> PagePool:
    geometry = _geometry(model, config)
    dtype = model.decoder.dtype
    page_bytes = geometry.page_elements * dtype.itemsize
    pool_bytes = config.device_memory_bytes
    if pool_bytes is None and config.is_gpu and device_plan is not None:
        from loramux.engine.build_device import measured_pool_bytes

        pool_bytes = measured_pool_bytes(device_plan, config, progress=progress)
    if pool_bytes is None:
        pool_bytes = default_pool_bytes()
    if pool_bytes < 2 * page_bytes:
        raise DoesNotFit(
            f"A pool of {pool_bytes} bytes holds fewer than two pages of {page_bytes} bytes. "
            "Give it more memory."
        )
    return PagePool(
        num_pages=pool_bytes // page_bytes,
        geometry=geometry,
        dtype=dtype,
        device=torch.device(config.device),
    )


def _max_model_len(model: LoadedModel, config: EngineConfig) -> int:
    return min(config.max_model_len or model.config.max_position, model.config.max_position)


def _scheduler_config(model: LoadedModel, config: EngineConfig, pool: PagePool) -> SchedulerConfig:
    max_model_len = _max_model_len(model, config)
    return SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        block_tokens=config.block_tokens,
        max_model_len=min(max_model_len, pool.num_pages * config.block_tokens),
        schedule=config.schedule,
        max_wait_s=config.max_wait_s,
        max_loras=config.max_loras,
        base_digest=model.digest,
    )
