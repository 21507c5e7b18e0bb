"""Builds the executor of a GPU: sizes its pages, compiles its kernels and captures its graphs."""

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
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, Rows, SampleRow, StepPlan

Progress = Callable[[str, float], None]
_MIB = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuExecutors:
    """Makes executors of one model that differ in their number of pages.

    Until the memory for pages is known, executors with few of them measure it and compile kernels.
    """

    model: LoadedModel
    linears: tuple[LinearSpec, ...]
    kv: KVLayout
    page_bytes: int
    limits: BatchLimits
    device: torch.device

    def make(self, num_pages: int) -> GpuRunner:
        return GpuRunner(
            decoder=self.model.decoder,
            pool=PagePool(num_pages, self.page_bytes, self.device),
            kv=self.kv,
            directory=self._directory(num_pages),
            kernels=select_device_kernels(self.device),
            limits=self.limits,
        )

    def _directory(self, num_pages: int) -> DeviceDirectory:
        max_adapters = min(MAX_DEVICE_ADAPTERS, num_pages)
        return DeviceDirectory(
            self.linears,
            num_layers=self.kv.num_layers,
            max_adapters=max_adapters,
            max_blocks=BLOCKS_PER_ADAPTER * max_adapters,
            device=self.device,
            extras=DeviceExtras(
                self.linears,
                num_layers=self.kv.num_layers,
                vocab_size=self.model.config.head_size,
                num_pages=num_pages,
                device=self.device,
                max_adapters=min(MAX_ADAPTERS, max_adapters),
            ),
        )

    @property
    def pages_of_step(self) -> int:
        """Pages of the largest step."""
        block = self.kv.block_tokens
        return self.limits.max_sequences + -(-self.limits.max_batch_tokens // block)

    @property
    def variants(self) -> str:
        """All that the variants of the kernels depend on, besides their source."""
        decoder = self.model.decoder
        appended = [rows.shape for rows in (appended_rows(decoder) or [[]])[0]]
        formats = sorted({linear.gemm_key for _, linear in decoder.linears()})
        sizes = (self.model.config, decoder.dtype, formats, self.kv, self.limits, appended)
        return repr((device_name(self.device), sizes))


def compile_kernels(executors: GpuExecutors, progress: Progress | None) -> None:
    """Compile the kernels of all steps in parallel processes, unless they are in Triton's cache.

    A kernel that cannot be compiled there is compiled at its first launch.
    """
    from loramux.kernels.gpu.precompile import CompiledStamp, KernelCompiler, collecting_kernels

    stamp = CompiledStamp(executors.variants)
    if stamp.exists:
        return

    def report(share: float) -> None:
        if progress is not None:
            progress("Compiling kernels", share)

    report(0.0)
    with contextlib.closing(KernelCompiler()) as compiler:
        runner = executors.make(executors.pages_of_step)
        with collecting_kernels(compiler.submit):
            runner.dry_run(_fitting_steps(runner, executors.limits))
        errors = compiler.wait(report)
    del runner
    release_cached(executors.device)
    if errors:
        _log.warning(
            "%d of %d kernels are compiled at their first launch: %s",
            *(len(errors), compiler.num_kernels, errors[0]),
        )
    else:
        stamp.write()


def prepare(runner: GpuRunner, limits: BatchLimits, progress: Progress | None) -> None:
    """Capture the graphs that every step can run on, and load the other kernels.

    The pool must be empty. The executor captures the other graphs when it is idle.
    """
    runner.capture_largest(progress)
    if runner.is_gpu:
        runner.warm_up(_fitting_steps(runner, limits))


def _fitting_steps(runner: GpuRunner, limits: BatchLimits) -> list[StepPlan]:
    steps = warm_up_steps(limits, runner.kv.block_tokens, runner.num_pages)
    return [s for s in steps if sum(len(chunk.page_ids) for chunk in s.chunks) <= runner.num_pages]


def measured_pool_bytes(
    executors: GpuExecutors, config: ResolvedConfig, *, progress: Progress | None = None
) -> int:
    """Return the device memory left for pages after weights, working memory and graphs."""
    device = executors.device
    if progress is not None:
        progress("Measuring memory", 0.0)
    try:
        working = _working_bytes(executors)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(_too_little(device, config, None)) from error
    finally:
        release_cached(device)
    free, total = device_memory_bytes(device)
    pool_bytes = int(total * config.gpu_memory_utilization) - (total - free) - working
    if pool_bytes < executors.page_bytes * executors.pages_of_step:
        raise DoesNotFit(_too_little(device, config, working))
    return pool_bytes


def _working_bytes(executors: GpuExecutors) -> int:
    """Measure the memory of a runner after its largest step and its largest graphs."""
    device = executors.device
    release_cached(device)
    before, _ = device_memory_bytes(device)
    runner = executors.make(executors.pages_of_step)
    runner.run(largest_step(executors.limits, executors.kv.block_tokens))
    runner.capture_largest()
    after, _ = device_memory_bytes(device)
    return before - after - runner.pool_bytes


def largest_step(limits: BatchLimits, block_tokens: int) -> StepPlan:
    """Return a step of the most tokens and sequences, sampling a token for each sequence."""
    num_sequences = min(limits.max_sequences, limits.max_batch_tokens)
    lengths = [limits.max_batch_tokens // num_sequences] * num_sequences
    lengths[0] += limits.max_batch_tokens - sum(lengths)
    return _step([(0, length) for length in lengths], block_tokens)


def warm_up_steps(limits: BatchLimits, block_tokens: int, num_pages: int) -> list[StepPlan]:
    """Step of prefill and decode at small and large sizes, which use different kernels."""
    longest = min(limits.max_pages, num_pages // 4) * block_tokens
    most = max(1, min(limits.max_batch_tokens, longest - 1))
    few = max(1, most // 8)
    shapes = [
        [(0, most)],
        [(0, few)] * min(8, limits.max_sequences),
        [(longest - 1, 1), (0, few)],
        [(longest - most, most), (0, 1)],
    ]
    steps = [_step(shape, block_tokens) for shape in shapes]
    return [largest_step(limits, block_tokens), *steps]


def _step(shape: Sequence[tuple[int, int]], block_tokens: int) -> StepPlan:
    """Make a step from the (first position, number of tokens) of each sequence."""
    row = SampleRow(SamplingParams(temperature=0.0), 0, (), ())
    chunks = []
    first_page = 0
    for number, (start, length) in enumerate(shape):
        num_pages = -(-(start + length) // block_tokens)
        page_ids = range(first_page, first_page + num_pages)
        first_page += num_pages
        chunks.append(
            Chunk(number, [0] * length, start, page_ids, (), (Rows(length - 1, 1, row),), 1)
        )
    return StepPlan(tuple(chunks))


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
