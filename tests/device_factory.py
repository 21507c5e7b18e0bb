"""Builds GPU engines on a CPU: torch reference kernels, attention in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.engine.engine import Engine
from loramux.lora.graph_lora import LoraMode
from loramux.runner.gemm.dispatch import GemmDispatcher
from loramux.runner.gpu_runner import BatchLimits, GpuRunner
from loramux.types.request import Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import Chunk, SampleRow
from tests.adapter_factory import ATTENTION, make_peft_adapter
from tests.chunk_factory import make_chunk
from tests.engine_factory import make_engine
from tests.memory_factory import Clock, InlineExecutor

ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class SplitKGemms(GemmDispatcher):
    """Every GEMM that may be split-K is."""

    def __init__(self, num_splits: int) -> None:
        super().__init__(None)
        self._num_splits = num_splits
        self.num_outputs: list[int] = []
        """Outputs of each split-K GEMM."""

    def split_k(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            return self.linear(x, weight, bias)
        self.num_outputs.append(len(weight))
        splits = zip(*(t.float().chunk(self._num_splits, 1) for t in (x, weight)), strict=True)
        return torch.stack([part @ of_weight.t() for part, of_weight in splits])


def device_engine(
    patch: pytest.MonkeyPatch, model: Any, folder: Path, **settings: Any
) -> tuple[Engine, GpuRunner]:
    with patch.context() as scoped:
        scoped.setenv("LORAMUX_KERNELS", "triton")
        engine = make_engine(model, folder, loads=InlineExecutor(), clock=Clock(), **settings)
    assert isinstance(engine.executor, GpuRunner)
    return engine, engine.executor


def runner_with(runner: GpuRunner, limits: BatchLimits, **ops: Any) -> GpuRunner:
    """Return a second runner over the weights, pages and adapters of another, with
    other kernels.
    """
    return GpuRunner(
        decoder=runner._decoder._decoder,
        pool=runner.pool,
        kv=runner.kv,
        directory=runner.directory,
        kernels=replace(runner._kernels, **ops),
        limits=limits,
    )


def last_launch(runner: GpuRunner) -> tuple[str, LoraMode, dict[int, Tensor]]:
    """Return the kind and mode of the graph of the last step, and its logits by sequence."""
    (launch,) = runner.trace()
    assert launch.kind is not None and launch.key is not None, "the step ran without a graph"
    return launch.kind, launch.key[1], dict(launch.logits)


def reference_engine(model: Any, folder: Path, **settings: Any) -> Engine:
    settings = {"reference_kernels": True, **settings}
    return make_engine(model, folder, loads=InlineExecutor(), clock=Clock(), **settings)


def two_adapters(model: Any, folder: Path, *, places: Sequence[str] = ALL_LINEAR) -> list[Path]:
    """Make an adapter of rank 3 at q and v, and one of two rank blocks at all of `places`."""
    few = make_peft_adapter(folder / "few", model, r=3, seed=1)
    many = make_peft_adapter(folder / "many", model, r=20, seed=2, target_modules=list(places))
    return [few, many]


def mixed_selections(engine: Engine, folders: list[Path]) -> list[Selection]:
    """Return selections of the base, of one adapter and of two, mixed."""
    first, second = (engine.register_adapter(folder).cid for folder in folders)
    one, other = ((first, 1.0),), ((second, 1.0),)
    return [(), one, other, ((first, 0.5), (second, 1.5)), one, ()]


def lease(engine: Engine, *selections: Selection) -> None:
    """Load the adapters of these selections and keep them on the device."""
    cids = {cid for selection in selections for cid, _ in selection}
    assert engine.residency.load_now(sorted(cids))


def row(**params: Any) -> SampleRow:
    settings = SamplingParams(**{"temperature": 0.0, **params})
    return SampleRow(params=settings, seed=7, prompt_token_ids=(5, 6), output_token_ids=(9,))


def decode(number: int, token: int, start: int, pages: list[int], selection: Selection) -> Chunk:
    return make_chunk(number, (token,), start, pages, selection, sample=row())
