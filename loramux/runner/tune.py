"""Tunes the GEMMs of a model for this GPU: the shapes that its graphs have, over random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loramux.errors import UnsupportedModel
from loramux.kernels.gpu.lora_augmented.tables import augmented_launch
from loramux.kernels.ops import DeviceKernels, ElementwiseOps, Norm
from loramux.kernels.select import select_device_kernels
from loramux.memory.device import device_name, run_seconds, steady_state_seconds
from loramux.models.architectures import DecoderConfig, linears_of
from loramux.models.augmented_linear import RANK_BLOCK
from loramux.runner.decode_graphs import BATCH_SIZES
from loramux.runner.gemm.autotune import Autotuner, Consumer, FusedSwiglu, Timing, num_cold_weights
from loramux.runner.gemm.dispatch import TUNED_ROWS, open_cublaslt, open_small_m
from loramux.runner.gemm.table import TunedTable
from loramux.runner.prefill_graphs import TOKEN_COUNTS

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer whose GEMMs are tuned."""

    name: str
    num_outputs: int
    num_inputs: int
    num_projections: int = 0
    """Projections whose rank blocks may be appended to its weight; 0: none."""
    max_rows: int = TUNED_ROWS[-1]
    is_added: bool = False
    is_gated: bool = False


def linear_shapes(config: DecoderConfig) -> list[LinearShape]:
    """Return the dispatched linears of a model: torch computes those with a bias."""
    found = [
        LinearShape(
            spec.name,
            spec.num_outputs,
            spec.in_features,
            len(spec.projections),
            is_added=spec.is_added,
            is_gated=spec.is_gated,
        )
        for spec in linears_of(config)
        if not spec.has_bias
    ]
    if config.final_logit_softcap is None:
        # One row per sequence at most.
        found.append(
            LinearShape("lm_head", config.vocab_size, config.hidden_size, max_rows=BATCH_SIZES[-1])
        )
    return found


def row_counts(min_rows: int) -> list[int]:
    """Return the row counts of all graphs that are tuned."""
    counts = {*BATCH_SIZES, *TOKEN_COUNTS}
    return sorted(count for count in counts if min_rows <= count <= TUNED_ROWS[-1])


def appended_blocks(num_rows: int, augmented_ranks: int) -> list[int]:
    """Return the numbers of rank blocks that steps of num_rows rows compute behind a weight."""
    launch, num_blocks = augmented_launch(num_rows), augmented_ranks // RANK_BLOCK
    most = min(launch.max_blocks, num_blocks)
    narrow = launch.narrow_blocks
    found = {0, most, *([narrow] if narrow is not None and narrow < most else [])}
    return sorted(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    dtype: torch.dtype = torch.bfloat16
    augmented_ranks: int = 256
    """`--lora-augmented-ranks` of the server."""


def tune_model(
    config: DecoderConfig, device: torch.device, options: TuneOptions, progress: Progress
) -> TunedTable:
    library = open_cublaslt(device)
    if library is None:
        raise UnsupportedModel(
            f"There is no cuBLASLt for device {device}: GEMMs can be tuned on an NVIDIA GPU only."
        )
    small_m = open_small_m(device)
    counts = row_counts(TUNED_ROWS[0] if small_m is None else small_m.max_rows + 1)
    autotuner = Autotuner(library, Timing(run_seconds, partial(steady_state_seconds, device)))
    kernels = select_device_kernels(device)
    table = TunedTable(device_name(device), library.version)
    shapes = linear_shapes(config)
    for number, shape in enumerate(shapes):
        progress(f"Tuning {shape.name}", number / len(shapes))
        cases = _cases(shape, counts, options.augmented_ranks)
        most = max(num_outputs for _, _, num_outputs in cases)
        weights = _random_weights(most, shape.num_inputs, options.dtype, device)
        for first_m, m, n in cases:
            entry = autotuner.tune(
                _random(m, shape.num_inputs, options.dtype, device),
                [weight[:n] for weight in weights],
                first_m=first_m,
                consumer=_consumer(shape, kernels.elementwise, options.dtype, device),
                swiglu=_swiglu(shape, kernels, config.activation, n),
            )
            table.add([entry])
    progress("Tuning", 1.0)
    return table


def _cases(
    shape: LinearShape, counts: list[int], augmented_ranks: int
) -> list[tuple[int, int, int]]:
    """(first m, m, n): rows above the previous count share a graph's size."""
    return list(_each_case(shape, counts, augmented_ranks))


def _each_case(
    shape: LinearShape, counts: list[int], augmented_ranks: int
) -> Iterator[tuple[int, int, int]]:
    previous = TUNED_ROWS[0] - 1
    for count in counts:
        if count > shape.max_rows:
            return
        for num_blocks in appended_blocks(count, augmented_ranks if shape.num_projections else 0):
            appended = num_blocks * shape.num_projections * RANK_BLOCK
            yield previous + 1, count, shape.num_outputs + appended
        previous = count


def _random_weights(n: int, k: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    count = num_cold_weights(n * k * dtype.itemsize)
    return [_random(n, k, dtype, device) for _ in range(count)]


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros would draw less power, and so be faster, than weights."""
    return torch.randn(rows, columns, dtype=dtype, device=device).div_(columns**0.5)


def _consumer(
    shape: LinearShape, elementwise: ElementwiseOps, dtype: torch.dtype, device: torch.device
) -> Consumer | None:
    """add_norm, which reduces split-K partial sums."""
    if not shape.is_added:
        return None
    size = shape.num_outputs
    norm = Norm(torch.ones(size, dtype=dtype, device=device), 1e-5)

    def consume(y: Tensor) -> Callable[[], object]:
        residual = y.new_zeros(y.shape[-2], size, dtype=dtype)
        # The appended rank blocks are few beside the outputs.
        return lambda: elementwise.add_norm(y[..., :size], residual, norm)

    return consume


def _swiglu(
    shape: LinearShape, kernels: DeviceKernels, activation: str, num_outputs: int
) -> FusedSwiglu | None:
    """Only a weight without appended rank blocks is gate and up side by side."""
    swiglu = kernels.swiglu
    if not shape.is_gated or swiglu is None or num_outputs != shape.num_outputs:
        return None
    return FusedSwiglu(
        supports=swiglu.supports,
        fused=partial(swiglu.linear_swiglu, activation=activation),
        activate=partial(kernels.elementwise.activate_mul, activation=activation),
    )
