"""The parts of an engine that a GPU needs: how large its pool may be, and the runner over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.packed.dense import Site
from loramux.config.engine import EngineConfig
from loramux.errors import DoesNotFit
from loramux.kernels.select import select_device_kernels
from loramux.lora.segmented import DeviceDirectory
from loramux.memory.device import (
    device_memory_bytes,
    is_out_of_memory,
    release_cached,
)
from loramux.memory.pool import KVGeometry, PagePool
from loramux.models.loader import LoadedModel
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow, StepPlan

Progress = Callable[[str, float], None]
# Adapters on the device at once, and groups of 16 ranks that each has in a layer on average.
_MAX_ADAPTERS = 8192
_GROUPS_PER_ADAPTER = 16
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a runner is made for, before there is memory to run in."""

    model: LoadedModel
    sites: tuple[Site, ...]
    geometry: KVGeometry
    limits: BatchLimits

    def make_pool(self, num_pages: int, device: torch.device) -> PagePool:
        return PagePool(
            num_pages=num_pages,
            geometry=self.geometry,
            dtype=self.model.decoder.dtype,
            device=device,
        )

    def make_directory(self, pool: PagePool) -> DeviceDirectory:
        max_adapters = min(_MAX_ADAPTERS, pool.num_pages)
        return DeviceDirectory(
            self.sites,
            num_layers=self.geometry.num_layers,
            max_adapters=max_adapters,
            max_blocks=_GROUPS_PER_ADAPTER * max_adapters,
            device=pool.device,
        )

    def make_runner(self, pool: PagePool, directory: DeviceDirectory) -> GpuRunner:
        return GpuRunner(
            decoder=self.model.decoder,
            pool=pool,
            directory=directory,
            kernels=select_device_kernels(pool.device),
            limits=self.limits,
        )


def prepare(plan: DevicePlan, runner: GpuRunner, progress: Progress | None) -> None:
    """Captures and compiles all that is not compiled yet; the pool must be empty."""
    runner.capture(progress)
    if runner.is_gpu:
        num_pages = runner.num_pages
        steps = [step for step in warm_up_steps(plan, num_pages) if _fits(step, num_pages)]
        runner.warm_up(steps)


def _fits(step: StepPlan, num_pages: int) -> bool:
    return sum(len(chunk.page_ids) for chunk in step.chunks) <= num_pages


def measured_pool_bytes(
    plan: DevicePlan, config: EngineConfig, *, progress: Progress | None = None
) -> int:
    """What is left of the share that we may use, after weights, working memory and graphs."""
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
    page_bytes = plan.geometry.page_elements * plan.model.decoder.dtype.itemsize
    if pool_bytes < page_bytes * _pages_of_step(plan):
        raise DoesNotFit(_too_little(device, config, working))
    return pool_bytes


def _working_bytes(plan: DevicePlan, device: torch.device) -> int:
    """Memory that a runner takes when it has computed its largest step and its largest graph."""
    release_cached(device)
    before, _ = device_memory_bytes(device)
    pool = plan.make_pool(_pages_of_step(plan), device)
    runner = plan.make_runner(pool, plan.make_directory(pool))
    runner.run(largest_step(plan))
    runner.capture_largest()
    after, _ = device_memory_bytes(device)
    return before - after - runner.pool_bytes


def largest_step(plan: DevicePlan) -> StepPlan:
    """As many rows as a step may have, of as many sequences, with a token sampled for each."""
    limits = plan.limits
    num_sequences = min(limits.max_sequences, limits.max_batch_tokens)
    lengths = [limits.max_batch_tokens // num_sequences] * num_sequences
    lengths[0] += limits.max_batch_tokens - sum(lengths)
    return _step(plan, [(0, length) for length in lengths])


def warm_up_steps(plan: DevicePlan, num_pages: int) -> list[StepPlan]:
    """Prompts and tokens, few and many, short and long: each has kernels of its own."""
    limits, block = plan.limits, plan.geometry.block_tokens
    longest = min(limits.max_pages, num_pages // 4) * block
    rows = max(1, min(limits.max_batch_tokens, longest - 1))
    few = max(1, rows // 8)
    shapes = [
        [(0, rows)],
        [(0, few)] * min(8, limits.max_sequences),
        [(longest - 1, 1), (0, few)],
        [(longest - rows, rows), (0, 1)],
    ]
    return [largest_step(plan), *(_step(plan, shape) for shape in shapes)]


def _step(plan: DevicePlan, shape: Sequence[tuple[int, int]]) -> StepPlan:
    """shape: (position of the first row, rows) of each sequence."""
    block = plan.geometry.block_tokens
    row = SampleRow(SamplingParams(temperature=0.0), 0, (), ())
    chunks = []
    first_page = 0
    for number, (start, length) in enumerate(shape):
        num_pages = -(-(start + length) // block)
        page_ids = range(first_page, first_page + num_pages)
        first_page += num_pages
        chunks.append(Chunk(number, [0] * length, start, page_ids, (), sample=row))
    return StepPlan(tuple(chunks))


def _pages_of_step(plan: DevicePlan) -> int:
    block = plan.geometry.block_tokens
    return plan.limits.max_sequences + -(-plan.limits.max_batch_tokens // block)


def _too_little(device: torch.device, config: EngineConfig, working: int | None) -> str:
    free, total = device_memory_bytes(device)
    share = config.gpu_memory_utilization
    needs = "more than is left" if working is None else f"{working // _MIB} MiB"
    return (
        f"No room for the page pool on {device}: of {total // _MIB} MiB the server may use "
        f"{share:.0%}, {(total - free) // _MIB} MiB are taken (weights and other processes), and "
        f"the largest step and its graphs need {needs}. Raise gpu_memory_utilization, or lower "
        f"max_batch_tokens ({config.max_batch_tokens}) or max_sequences ({config.max_sequences})."
    )
