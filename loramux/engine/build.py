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
from loramux.adapters.packed.paged import page_bytes_of
from loramux.adapters.rescale import FoldedScales
from loramux.config.engine import ResolvedConfig, SchedulerConfig
from loramux.config.fields import AUTO
from loramux.engine.engine import Engine
from loramux.engine.memory import Clock, build_memory
from loramux.errors import DoesNotFit, UnsupportedModel
from loramux.kernels.compile_ahead import CompileAhead
from loramux.kernels.select import select_kernels
from loramux.lora.merge import MergeSource
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
from loramux.models.loader import LoadedModel, LoadOptions, load_model
from loramux.models.locate import locate_model
from loramux.models.packed_linear import pack_linears
from loramux.models.pooling import read_pooling
from loramux.runner.cpu_runner import CpuRunner, LaterKernels
from loramux.scheduler.prompt_lookup import PromptLookup
from loramux.scheduler.scheduler import Scheduler
from loramux.types.kv import KVLayout
from loramux.types.model import BaseModelInfo
from loramux.types.pooling import ModelPooling

if TYPE_CHECKING:
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
        if sizes.experts is not None and (config.is_gpu or config.wants_device_kernels):
            raise UnsupportedModel(
                f"{sizes.architecture} has experts, which run on a CPU only: add --device cpu."
            )
        count = base_info(sizes, path.name).num_parameters
        return resolve_dtype(config.dtype, config.device, num_parameters=count)

    is_on_gpu = config.is_gpu and config.wants_device_kernels
    model = load_model(
        path,
        dtype=dtype,
        device=config.device,
        progress=progress,
        before_reading=partial(_augment, config=config) if is_on_gpu else None,
        options=LoadOptions(config.max_model_len, config.quantization),
    )
    packs = config.pack_weights and not config.is_gpu and not config.wants_device_kernels
    if packs and not config.wants_reference_kernels and model.config.experts is None:
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
    if config.wants_device_kernels:
        # Before free memory is measured: the appended rows are part of the weights.
        _augment(model.decoder, config=config)
    # Before the executor wraps the linears.
    base_weights = DecoderWeights(model.decoder, lambda: model.reading.result())
    executor: CpuRunner | GpuRunner
    if config.wants_device_kernels:
        executor = _gpu_executor(model, config, base, progress)
    else:
        executor = _cpu_executor(model, config, base, progress, ahead)
    rules = AdapterRules(
        base=base,
        packing=_packing(base, executor, config),
        max_rank=config.max_rank,
        strict_base=config.strict_base,
        base_weights=base_weights,
        max_bytes=executor.pool_bytes,
        folded=folded,
    )
    memory = build_memory(config, rules, executor, clock=clock, loads=loads)
    # The digest is known when the weights are read.
    scheduler = Scheduler(
        _scheduler_config(model, config, executor),
        pages=memory.pages,
        reclaimer=memory.reclaimer,
        adapters=memory.residency,
        prefixes=memory.prefixes,
        drafts=None if config.speculative is None else PromptLookup(config.speculative),
    )
    return Engine(
        scheduler=scheduler,
        executor=executor,
        memory=memory,
        vocab_size=model.config.vocab_size,
        pooling=pooling,
        merge=_merge_controller(config, executor) if isinstance(executor, CpuRunner) else None,
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


def _kv_layout(model: LoadedModel, config: ResolvedConfig, base: BaseModelInfo) -> KVLayout:
    dtype = config.kv_cache_dtype
    if dtype == AUTO:
        dtype = str(model.decoder.dtype).removeprefix("torch.")
    return base.kv_layout(config.block_tokens, dtype)


def _cpu_executor(
    model: LoadedModel,
    config: ResolvedConfig,
    base: BaseModelInfo,
    progress: Progress | None,
    ahead: CompileAhead | None,
) -> CpuRunner:
    """Build the executor of a CPU, or of the reference kernels on any device."""
    if progress is not None and not config.is_gpu:
        # Without `ahead` numba compiles for 15 to 60 s on two cores, once.
        progress("Preparing CPU kernels", 0.0)
    dtype, kv = model.decoder.dtype, _kv_layout(model, config, base)
    page_bytes = page_bytes_of(kv.page_bytes, dtype.itemsize, "dense")
    pool_bytes = config.device_memory_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes()
    num_pages = _num_pages(pool_bytes, page_bytes)
    # Experts have no compiled kernels.
    has_experts = model.config.experts is not None
    ahead = None if has_experts else ahead
    select = partial(
        select_kernels,
        config.device,
        reference=config.wants_reference_kernels or config.is_gpu or has_experts,
        dtype=dtype,
    )
    return CpuRunner(
        decoder=model.decoder,
        linears=base.linears,
        pool=PagePool(num_pages, page_bytes, torch.device(config.device)),
        kv=kv,
        kernels=select(may_compile=config.may_compile_kernels and ahead is None),
        later=None if ahead is None else LaterKernels(ahead, partial(select, may_compile=True)),
    )


def _gpu_executor(
    model: LoadedModel, config: ResolvedConfig, base: BaseModelInfo, progress: Progress | None
) -> GpuRunner:
    from loramux.engine import build_device
    from loramux.runner.gpu_runner import BatchLimits

    kv = _kv_layout(model, config, base)
    executors = build_device.GpuExecutors(
        model=model,
        linears=base.linears,
        kv=kv,
        page_bytes=page_bytes_of(kv.page_bytes, model.decoder.dtype.itemsize, "paged"),
        limits=BatchLimits(
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            max_pages=-(-_max_model_len(model, config) // config.block_tokens),
        ),
        device=torch.device(config.device),
    )
    if config.is_gpu:
        build_device.compile_kernels(executors, progress)
    pool_bytes = config.device_memory_bytes
    if pool_bytes is None and config.is_gpu:
        pool_bytes = build_device.measured_pool_bytes(executors, config, progress=progress)
    if pool_bytes is None:
        pool_bytes = default_pool_bytes()
    runner = executors.make(_num_pages(pool_bytes, executors.page_bytes))
    build_device.prepare(runner, executors.limits, progress)
    return runner


def _num_pages(pool_bytes: int, page_bytes: int) -> int:
    if pool_bytes < 2 * page_bytes:
        raise DoesNotFit(
            f"A pool of {pool_bytes} bytes holds fewer than two pages of {page_bytes} bytes. "
            "Give it more memory."
        )
    return pool_bytes // page_bytes


def _packing(
    base: BaseModelInfo, executor: CpuRunner | GpuRunner, config: ResolvedConfig
) -> Packing:
    linears, dtype, page_bytes = base.linears, executor.dtype, executor.page_bytes
    allocate = host_buffer(executor.device)
    if isinstance(executor, CpuRunner):
        if executor.device.type == "cpu":
            budget_bytes = config.host_memory_bytes
            allocate = HostBuffers(
                spare_bytes=int(budget_bytes * _MAX_SPARE_FRACTION), budget_bytes=budget_bytes
            ).allocate
        return DensePacking(linears, dtype, page_bytes, allocate)
    return PagedPacking(linears, dtype, page_bytes, allocate)


def _merge_controller(config: ResolvedConfig, runner: CpuRunner) -> MergeController | None:
    if config.merge == "off":
        return None
    byte_limit = config.merge_memory_bytes
    return MergeController(
        runner.lora,
        MergeSource(bases=runner.lora.bases, deltas=runner.deltas),
        byte_limit=total_memory_bytes() // 4 if byte_limit is None else byte_limit,
    )


def _augment(decoder: Decoder, *, config: ResolvedConfig) -> None:
    """Append the rows for LoRA A to the weights, if the config asks for them and they have none."""
    from loramux.models.augmented_linear import RANK_BLOCK, augment_linears

    if config.lora_augmented_ranks:
        augment_linears(decoder, config.lora_augmented_ranks // RANK_BLOCK)


def _max_model_len(model: LoadedModel, config: ResolvedConfig) -> int:
    return min(config.max_model_len or model.config.max_position, model.config.max_position)


def _scheduler_config(
    model: LoadedModel, config: ResolvedConfig, executor: CpuRunner | GpuRunner
) -> SchedulerConfig:
    max_model_len = _max_model_len(model, config)
    return SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        block_tokens=config.block_tokens,
        max_model_len=min(max_model_len, executor.num_pages * config.block_tokens),
        schedule=config.schedule,
        max_wait_s=config.max_wait_s,
        max_loras=config.max_loras,
        base_digest=model.digest,
    )
