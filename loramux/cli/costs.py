"""What an adapter costs a server on this machine: pages, bytes by kind, bytes read per token."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from loramux.adapters.packed.extras import ExtraKind, ExtraSpec
from loramux.adapters.peft.doctor import Cost, KindCost, Report
from loramux.capacity.parts import (
    KIND_NAMES,
    LOW_RANK,
    base_token_bytes,
    full_module_warnings,
    low_rank_bytes,
    measure_adapter,
)
from loramux.capacity.plan import MeasuredAdapter, PlannedBase
from loramux.cli.plan import local_device
from loramux.config.engine import EngineConfig
from loramux.config.fields import AUTO
from loramux.memory.host_memory import available_memory_bytes
from loramux.models.dtypes import resolve_dtype
from loramux.types.model import BaseModelInfo


def planned_here(base: BaseModelInfo) -> PlannedBase:
    """Return the base as a server on this machine would hold it."""
    device, _, _ = local_device(AUTO)
    config = EngineConfig().resolve(device, available_bytes=available_memory_bytes())
    kind = "cuda" if config.is_gpu else "cpu"
    dtype = str(resolve_dtype(AUTO, kind, num_parameters=base.num_parameters))
    return PlannedBase(
        name=base.name,
        shapes=base,
        dtype=dtype.removeprefix("torch."),
        block_tokens=config.block_tokens,
        packing="paged" if config.is_gpu else "dense",
    )


def with_cost(report: Report, base: PlannedBase) -> Report:
    """Add the bytes in the pool and per token, and a warning for full modules.

    Raises DoesNotFit if a part does not fit into pages.
    """
    extras = [
        ExtraSpec(one.layer, one.module, ExtraKind(one.kind), one.num_rows, one.width)
        for one in report.parts
    ]
    ranks = {(one.layer, one.projection): one.rank for one in report.modules}
    measured = measure_adapter(base, Path(report.folder).name, ranks, extras)
    shapes = {(one.projection, one.rank) for one in report.modules}
    sizes = {shape: low_rank_bytes(base, *shape) for shape in shapes}
    return replace(
        report,
        modules=tuple(
            replace(one, pool_bytes=sizes[one.projection, one.rank]) for one in report.modules
        ),
        parts=tuple(
            replace(one, pool_bytes=one.num_rows * one.width * base.element_bytes)
            for one in report.parts
        ),
        cost=Cost(
            dtype=base.dtype,
            pages=measured.num_pages(base),
            page_bytes=base.page_bytes,
            pool_bytes=measured.num_bytes,
            token_bytes=measured.token_bytes,
            base_token_bytes=base_token_bytes(base),
            kinds=kind_costs(report, measured),
        ),
        warnings=(*report.warnings, *full_module_warnings(base, measured)),
    )


def kind_costs(report: Report, measured: MeasuredAdapter) -> tuple[KindCost, ...]:
    in_file: dict[str, int] = defaultdict(int)
    for part in report.parts:
        in_file[KIND_NAMES[ExtraKind(part.kind)]] += part.file_bytes
    in_file[LOW_RANK] = sum(module.file_bytes for module in report.modules)
    return tuple(
        KindCost(
            kind=part.kind,
            modules=part.modules,
            file_bytes=in_file[part.kind],
            pool_bytes=part.bytes,
            token_bytes=part.token_bytes,
        )
        for part in measured.parts
    )
