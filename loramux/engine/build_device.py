"""Builds the GPU parts of an engine: sizes its page pool and prepares its runner."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.packed.paged import BLOCKS_PER_ADAPTER, MAX_DEVICE_ADAPTERS
from loramux.config.engine import ResolvedConfig
from loramux.errors import DoesNotFit
from loramux.kernels.select import select_device_kernels
from loramux.lora.device_extras import MAX_ADAPTERS, DeviceExtras
from loramux.lora.segmented import DeviceDirectory
from loramux.memory.device import (
    device_memory_bytes,
    device_name,
    is_out_of_memory,
    release_cached,
)
from loramux.memory.pool import PagePool
from loramux.models.augmented_linear import appended_rows
from loramux.models.loader import LoadedModel
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.model import FusedLinear, PagedLayout
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, Rows, SampleRow, StepPlan

Progress = Callable[[str, float], None]
_MIB = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The model and batch limits of a GPU runner, before its page pool is allocated."""

    model: LoadedModel
    linears: tuple[FusedLinear, ...]
    layout: PagedLayout
    limits: BatchLimits

    def make_pool(self, num_pages: int, device: torch.device) -> PagePool:
        return PagePool(
            num_pages=num_pages,
            geometry=self.layout,
            dtype=self.model.decoder.dtype,
            device=device,
        )

    def make_directory(self, pool: PagePool) -> DeviceDirectory:
        max_adapters = min(MAX_DEVICE_ADAPTERS, pool.num_pages)
        return DeviceDirectory(
            self.linears,
            num_layers=self.layout.num_layers,
            max_adapters=max_adapters,
            max_blocks=BLOCKS_PER_ADAPTER * max_adapters,
            device=pool.device,
            extras=DeviceExtras(
                num_layers=self.layout.num_layers,
                vocab_size=self.model.config.head_size,
                num_pages=pool.num_pages,
                device=pool.device,
                max_adapters=min(MAX_ADAPTERS, max_adapters),
            ),
        )

    def make_runner(self, pool: PagePool, directory: DeviceDirectory) -> GpuRunner:
        return GpuRunner(
            decoder=self.model.decoder,
            pool=pool,
            directory=directory,
            kernels=select_device_kernels(pool.device),
            limits=self.limits,
        )


def compile_kernels(plan: GpuPlan, device: torch.device, progress: Progress | None) -> None:
    """Compile the kernels of all steps in parallel processes, unless they are in Triton's cache.

    A kernel that cannot be compiled there is compiled at its first launch.
    """
    from loramux.kernels.gpu.precompile import CompiledStamp, KernelCompiler, collecting_kernels

    stamp = CompiledStamp(_variants_of(plan, device))
    if stamp.exists:
        return

    def report(share: float) -> None:
        if progress is not None:
            progress("Compiling kernels", share)

    report(0.0)
    with contextlib.closing(KernelCompiler()) as compiler:
        pool = plan.make_pool(_pages_of_step(plan), device)
        runner = plan.make_runner(pool, plan.make_directory(pool))
        with collecting_kernels(compiler.submit):
            runner.dry_run(_fitting_steps(plan, pool.num_pages))
        errors = compiler.wait(report)
    del runner, pool
    release_cached(device)
    if errors:
        _log.warning(
            "%d of %d kernels are compiled at their first launch: %s",
            *(len(errors), compiler.num_kernels, errors[0]),
        )
    else:
        stamp.write()


def _variants_of(plan: GpuPlan, device: torch.device) -> str:
    """Describe all that the variants of the kernels depend on, besides their source."""
    decoder = plan.model.decoder
    appended = [rows.shape for rows in (appended_rows(decoder) or [[]])[0]]
    sizes = (plan.model.config, decoder.dtype, plan.layout, plan.limits, appended)
    return repr((device_name(device), sizes))


def prepare(plan: GpuPlan, runner: GpuRunner, progress: Progress | None) -> None:
    """Capture the graphs that every step can run on, and load the other kernels.

    The pool must be empty. The executor captures the other graphs when it is idle.
    """
    runner.capture_largest(progress)
    if runner.is_gpu:
        runner.warm_up(_fitting_steps(plan, runner.num_pages))


def _fitting_steps(plan: GpuPlan, num_pages: int) -> list[StepPlan]:
    steps = warm_up_steps(plan, num_pages)
    return [s for s in steps if sum(len(chunk.page_ids) for chunk in s.chunks) <= num_pages]


def measured_pool_bytes(
    plan: GpuPlan, config: ResolvedConfig, *, progress: Progress | None = None
) -> int:
    """Return the device memory left for pages after weights, working memory and graphs."""
    device = torch.device(config.device)
    if progress is not None:
        progress("Measuring memory", 0.0)
    try:
        working = _working_bytes(plan, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(_too_little(device, config, None)) from error
    finally:
        release_cached(device)
    free, total = device_memory_bytes(device)
    pool_bytes = int(total * config.gpu_memory_utilization) - (total - free) - working
    page_bytes = plan.layout.page_elements * plan.model.decoder.dtype.itemsize
    if pool_bytes < page_bytes * _pages_of_step(plan):
        raise DoesNotFit(_too_little(device, config, working))
    return pool_bytes


def _working_bytes(plan: GpuPlan, device: torch.device) -> int:
    """Measure the memory of a runner after its largest step and its largest graphs."""
    release_cached(device)
    before, _ = device_memory_bytes(device)
    pool = plan.make_pool(_pages_of_step(plan), device)
    runner = plan.make_runner(pool, plan.make_directory(pool))
    runner.run(largest_step(plan))
    runner.capture_largest()
    after, _ = device_memory_bytes(device)
    return before - after - runner.pool_bytes


def largest_step(plan: GpuPlan) -> StepPlan:
    """A step of the most tokens and sequences, sampling a token for each sequence."""
    limits = plan.limits
    num_sequences = min(limits.max_sequences, limits.max_batch_tokens)
    lengths = [limits.max_batch_tokens // num_sequences] * num_sequences
    lengths[0] += limits.max_batch_tokens - sum(lengths)
    return _step(plan, [(0, length) for length in lengths])


def warm_up_steps(plan: GpuPlan, num_pages: int) -> list[StepPlan]:
    """Steps of prefill and decode at small and large sizes, which use different kernels."""
    limits, block = plan.limits, plan.layout.block_tokens
    longest = min(limits.max_pages, num_pages // 4) * block
    most = max(1, min(limits.max_batch_tokens, longest - 1))
    few = max(1, most // 8)
    shapes = [
        [(0, most)],
        [(0, few)] * min(8, limits.max_sequences),
        [(longest - 1, 1), (0, few)],
        [(longest - most, most), (0, 1)],
    ]
    return [largest_step(plan), *(_step(plan, shape) for shape in shapes)]


def _step(plan: GpuPlan, shape: Sequence[tuple[int, int]]) -> StepPlan:
    """Make a step from the (first position, number of tokens) of each sequence."""
    block = plan.layout.block_tokens
    row = SampleRow(SamplingParams(temperature=0.0), 0, (), ())
    chunks = []
    first_page = 0
    for number, (start, length) in enumerate(shape):
        num_pages = -(-(start + length) // block)
        page_ids = range(first_page, first_page + num_pages)
        first_page += num_pages
        chunks.append(
            Chunk(number, [0] * length, start, page_ids, (), (Rows(length - 1, 1, row),), 1)
        )
    return StepPlan(tuple(chunks))


def _pages_of_step(plan: GpuPlan) -> int:
    block = plan.layout.block_tokens
    return plan.limits.max_sequences + -(-plan.limits.max_batch_tokens // block)


def _too_little(device: torch.device, config: ResolvedConfig, working: int | None) -> str:
    free, total = device_memory_bytes(device)
    share = config.gpu_memory_utilization
    needs = "more than is left" if working is None else f"{working // _MIB} MiB"
    return (
        f"No room for the page pool on {device}: of {total // _MIB} MiB the server may use "
        f"{share:.0%}, {(total - free) // _MIB} MiB are taken (weights and other processes), and "
        f"the largest step and its graphs need {needs}. Raise gpu_memory_utilization, or lower "
        f"max_batch_tokens ({config.max_batch_tokens}) or max_sequences ({config.max_sequences})."
    )
