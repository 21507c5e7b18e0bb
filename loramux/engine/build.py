"""Builds an engine from a model on disk and a config."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loramux.adapters.loading import AdapterRules
from loramux.adapters.packed.packing import DensePacking, Packing, PagedPacking
from loramux.adapters.rescale import FoldedScales
from loramux.config.engine import ResolvedConfig, SchedulerConfig
from loramux.engine.engine import Engine
from loramux.engine.memory import Clock, EngineMemory, build_memory
from loramux.errors import DoesNotFit
from loramux.kernels.compile_ahead import CompileAhead
from loramux.kernels.select import select_kernels
from loramux.lora.merge import MergeSource, PageDeltas
from loramux.lora.merge_controller import MergeController
from loramux.memory.device import host_buffer
from loramux.memory.host_buffers import HostBuffers
from loramux.memory.host_memory import default_pool_bytes, total_memory_bytes
from loramux.memory.pool import PagePool
from loramux.models.architectures import DecoderConfig, base_info
from loramux.models.base_weights import DecoderWeights
from loramux.models.decoder import Decoder
from loramux.models.dtypes import resolve_dtype
from loramux.models.folded_scales import find_folded_scales
from loramux.models.loader import LoadedModel, load_model
from loramux.models.locate import locate_model
from loramux.models.packed_linear import pack_linears
from loramux.models.pooling import read_pooling
from loramux.runner.cpu_runner import CpuRunner, LaterKernels
from loramux.scheduler.scheduler import Scheduler
from loramux.types.model import BaseModelInfo, PagedLayout
from loramux.types.pooling import ModelPooling

if TYPE_CHECKING:
    from loramux.engine.build_device import GpuPlan
    from loramux.runner.gpu_runner import GpuRunner

Progress = Callable[[str, float], None]
# Freed host buffers are kept for reuse up to this fraction of the host budget.
_MAX_SPARE_FRACTION = 1 / 16


def load_base(
    path: Path,
    config: ResolvedConfig,
    *,
    progress: Progress | None = None,
    packs_later: bool = False,
) -> LoadedModel:
    """Load the base, with packed weights where the CPU kernels use them.

    `packs_later`: in float32 a CpuRunner with CompileAhead packs them.

    For a GPU it returns before the weights are read: kernels are compiled meanwhile.
    """

    def dtype(sizes: DecoderConfig) -> torch.dtype:
        count = base_info(sizes, path.name).num_parameters
        return resolve_dtype(config.dtype, config.device, num_parameters=count)

    is_on_gpu = config.is_gpu and config.wants_device_kernels
    model = load_model(
        path,
        dtype=dtype,
        device=config.device,
        progress=progress,
        before_reading=partial(_augment, config=config) if is_on_gpu else None,
        max_model_len=config.max_model_len,
    )
    packs = config.pack_weights and not config.is_gpu and not config.wants_device_kernels
    if packs and not config.wants_reference_kernels:
        is_later = packs_later and model.decoder.dtype == torch.float32
        byte_limit = total_memory_bytes() // 4
        pack_linears(model.decoder, byte_limit=byte_limit, packs_later=is_later)
    return model


def _pooling(model: LoadedModel, config: ResolvedConfig) -> ModelPooling:
    if not model.hf_config:  # Random weights have no files that could configure a pooling.
        return ModelPooling()
    return read_pooling(model.tokenizer_folder, model.hf_config, config.pooling)


def build_engine(
    model: LoadedModel,
    config: ResolvedConfig,
    *,
    clock: Clock = time.monotonic,
    loads: Executor | None = None,
    progress: Progress | None = None,
    ahead: CompileAhead | None = None,
) -> Engine:
    """Build an engine; `loads` runs adapter loads, by default on threads of the engine.

    `ahead`: the engine computes without compiled CPU kernels until these are done.
    """
    pooling = _pooling(model, config)
    base, folded = _compared_base(model, config)
    gpu_plan = _gpu_plan(model, config, base) if config.wants_device_kernels else None
    if gpu_plan is not None and config.is_gpu:
        from loramux.engine.build_device import compile_kernels

        compile_kernels(gpu_plan, torch.device(config.device), progress)
    pool = _make_pool(model, config, base.kv_layout(config.block_tokens), gpu_plan, progress)
    rules = AdapterRules(
        base=base,
        packing=_packing(base, pool, config, is_paged=gpu_plan is not None),
        max_rank=config.max_rank,
        strict_base=config.strict_base,
        base_weights=DecoderWeights(
            model.decoder, base.fused_linears, lambda: model.reading.result()
        ),
        max_bytes=pool.storage.nbytes,
        folded=folded,
    )
    directory = None if gpu_plan is None else gpu_plan.make_directory(pool)
    gpu_runner: GpuRunner | None = None
    if gpu_plan is not None and directory is not None:
        from loramux.engine.build_device import prepare

        gpu_runner = gpu_plan.make_runner(pool, directory)
        prepare(gpu_plan, gpu_runner, progress)
    memory = build_memory(config, rules, pool, clock=clock, loads=loads, device_table=directory)
    # The digest is known when the weights are read.
    scheduler = Scheduler(
        _scheduler_config(model, config, pool),
        pages=memory.pages,
        reclaimer=memory.reclaimer,
        adapters=memory.residency,
        prefixes=memory.prefixes,
    )
    merge = None
    if gpu_runner is None:
        runner = _cpu_runner(model, config, base, memory, progress, ahead)
        merge = _merge_controller(config, runner, PageDeltas(memory.placement.device, pool))
    return Engine(
        scheduler=scheduler,
        executor=gpu_runner or runner,
        memory=memory,
        vocab_size=model.config.vocab_size,
        pooling=pooling,
        merge=merge,
    )


def _compared_base(
    model: LoadedModel, config: ResolvedConfig
) -> tuple[BaseModelInfo, FoldedScales | None]:
    """Compare the base with its original, if the config names one."""
    base = base_info(model.config, model.name)
    if config.original is None:
        return base, None
    original = locate_model(config.original)
    folded = find_folded_scales(model.tokenizer_folder, original, model.config)
    return replace(base, folded_scales="none" if folded is None else "known"), folded


def _cpu_runner(
    model: LoadedModel,
    config: ResolvedConfig,
    base: BaseModelInfo,
    memory: EngineMemory,
    progress: Progress | None,
    ahead: CompileAhead | None,
) -> CpuRunner:
    if progress is not None and not config.is_gpu:
        # Without `ahead` numba compiles for 15 to 60 s on two cores, once.
        progress("Preparing CPU kernels", 0.0)
    select = partial(
        select_kernels,
        config.device,
        reference=config.wants_reference_kernels or config.is_gpu,
        dtype=memory.pool.storage.dtype,
    )
    return CpuRunner(
        decoder=model.decoder,
        linears=base.fused_linears,
        pool=memory.pool,
        adapters=memory.placement.device,
        kernels=select(may_compile=config.may_compile_kernels and ahead is None),
        later=None if ahead is None else LaterKernels(ahead, partial(select, may_compile=True)),
    )


def _packing(
    base: BaseModelInfo, pool: PagePool, config: ResolvedConfig, *, is_paged: bool
) -> Packing:
    linears, dtype = base.fused_linears, pool.storage.dtype
    allocate = host_buffer(pool.device)
    if not is_paged:
        if pool.device.type == "cpu":
            budget_bytes = config.host_memory_bytes
            allocate = HostBuffers(
                spare_bytes=int(budget_bytes * _MAX_SPARE_FRACTION), budget_bytes=budget_bytes
            ).allocate
        return DensePacking(linears, dtype, pool.geometry.page_elements, allocate)
    return PagedPacking(linears, dtype, pool.geometry.page_elements, allocate)


def _merge_controller(
    config: ResolvedConfig, runner: CpuRunner, deltas: PageDeltas
) -> MergeController | None:
    if config.merge == "off":
        return None
    byte_limit = config.merge_memory_bytes
    return MergeController(
        runner.lora,
        MergeSource(bases=runner.lora.bases, deltas=deltas),
        byte_limit=total_memory_bytes() // 4 if byte_limit is None else byte_limit,
    )


def _gpu_plan(model: LoadedModel, config: ResolvedConfig, base: BaseModelInfo) -> GpuPlan:
    from loramux.engine.build_device import GpuPlan
    from loramux.runner.gpu_runner import BatchLimits

    # Before free memory is measured: the appended rows are part of the weights.
    _augment(model.decoder, config=config)
    limits = BatchLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_pages=-(-_max_model_len(model, config) // config.block_tokens),
    )
    return GpuPlan(model, base.fused_linears, base.kv_layout(config.block_tokens), limits)


def _augment(decoder: Decoder, *, config: ResolvedConfig) -> None:
    """Append the rows for LoRA A to the weights, if the config asks for them and they have none."""
    from loramux.models.augmented_linear import RANK_BLOCK, augment_linears

    if config.lora_augmented_ranks:
        augment_linears(decoder, config.lora_augmented_ranks // RANK_BLOCK)


def _make_pool(
    model: LoadedModel,
    config: ResolvedConfig,
    layout: PagedLayout,
    gpu_plan: GpuPlan | None,
    progress: Progress | None,
) -> PagePool:
    dtype = model.decoder.dtype
    page_bytes = layout.page_elements * dtype.itemsize
    pool_bytes = config.device_memory_bytes
    if pool_bytes is None and config.is_gpu and gpu_plan is not None:
        from loramux.engine.build_device import measured_pool_bytes

        pool_bytes = measured_pool_bytes(gpu_plan, config, progress=progress)
    if pool_bytes is None:
        pool_bytes = default_pool_bytes()
    if pool_bytes < 2 * page_bytes:
        raise DoesNotFit(
            f"A pool of {pool_bytes} bytes holds fewer than two pages of {page_bytes} bytes. "
            "Give it more memory."
        )
    return PagePool(
        num_pages=pool_bytes // page_bytes,
        geometry=layout,
        dtype=dtype,
        device=torch.device(config.device),
    )


def _max_model_len(model: LoadedModel, config: ResolvedConfig) -> int:
    return min(config.max_model_len or model.config.max_position, model.config.max_position)


def _scheduler_config(
    model: LoadedModel, config: ResolvedConfig, pool: PagePool
) -> SchedulerConfig:
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
