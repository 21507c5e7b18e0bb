"""The memory of known GPUs, and an estimate of the page pool that an engine has on one."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.capacity.plan import GpuMemory, PlannedBase
from loramux.errors import InvalidRequest, suggest

_GIB = 2**30
# The total that torch reports, which is less than the name of the card says: drivers and ECC take
# the rest. Nominal values; boards and drivers differ by about 0.2 GiB.
GPU_GIB = {
    "a100-40": 39.4,
    "a100-80": 79.1,
    "a10g": 22.0,
    "b200": 178.3,
    "h100": 79.1,
    "h100-nvl": 93.1,
    "h200": 139.8,
    "l4": 22.0,
    "l40s": 44.3,
    "rtx3090": 23.6,
    "rtx4090": 23.6,
    "rtx5090": 31.3,
    "rtxa6000": 47.5,
}
# CUDA's context and the code of loaded kernels; and workspaces of cuBLAS, tables of adapters,
# partial results of attention, and captured graphs.
_CONTEXT_BYTES = 600 * 2**20
_WORKSPACE_BYTES = 400 * 2**20
# Logits of decode graphs, of prefill graphs, and of steps without a graph.
_LOGITS_COPIES = 3
# The largest step runs without a graph, before its capture, and in the graph, each in memory of
# its own; so do the smaller decode steps.
_STEP_COPIES, _DECODE_COPIES = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """The settings of an engine that take memory of a GPU."""

    max_batch_tokens: int
    max_sequences: int
    augmented_ranks: int
    utilization: float


def gpu_total_bytes(name: str) -> int:
    """Return the nominal memory of a GPU; raise InvalidRequest for an unknown one."""
    key = name.lower().removeprefix("nvidia-")
    if key not in GPU_GIB:
        variants = [known for known in GPU_GIB if known.startswith(f"{key}-")]
        raise InvalidRequest(
            f"There is no GPU {name!r} in the table. {suggest(key, variants or list(GPU_GIB))} For "
            "another one, give its memory with --device-total.",
            param="gpu",
        )
    return int(GPU_GIB[key] * _GIB)


def plan_gpu_memory(
    name: str, total_bytes: int, base: PlannedBase, settings: GpuSettings
) -> GpuMemory:
    """Estimates the page pool; an engine measures its working memory instead.

    Raises InvalidRequest if nothing is left for pages.
    """
    augmented = augmented_bytes(base, settings.augmented_ranks)
    working = working_bytes(base, settings)
    usable = int(total_bytes * settings.utilization)
    pool = usable - base.weight_bytes - augmented - working
    if pool < base.page_bytes:
        raise InvalidRequest(
            f"The weights take {base.weight_bytes + augmented} bytes in {base.dtype} and the "
            f"largest step about {working}, together more than {settings.utilization:.0%} of "
            f"the {total_bytes} bytes of {name}.",
            param="device_total",
        )
    return GpuMemory(
        name=name,
        total_bytes=total_bytes,
        utilization=settings.utilization,
        weight_bytes=base.weight_bytes,
        augmented_bytes=augmented,
        working_bytes=working,
        pool_bytes=pool,
    )


def augmented_bytes(base: PlannedBase, num_ranks: int) -> int:
    """Return the size of the rows behind the base weights, `num_ranks` for every projection."""
    per_rank = sum(linear.in_features * len(linear.projections) for linear in base.shapes.linears)
    return num_ranks * per_rank * base.shapes.num_layers * base.element_bytes


def working_bytes(base: PlannedBase, settings: GpuSettings) -> int:
    """Estimates context, workspaces, logits, and activations of the largest step and its graphs."""
    linears, hidden = base.shapes.linears, base.shapes.hidden_size
    widest = max(linear.in_features + linear.num_outputs for linear in linears)
    # Residual, norm and output of a linear, and the input and output of the widest linear.
    step_elements = 3 * hidden + widest
    logits = _LOGITS_COPIES * settings.max_sequences * base.shapes.vocab_size
    tokens = _STEP_COPIES * settings.max_batch_tokens + _DECODE_COPIES * settings.max_sequences
    elements = logits + tokens * step_elements
    return _CONTEXT_BYTES + _WORKSPACE_BYTES + elements * base.element_bytes
