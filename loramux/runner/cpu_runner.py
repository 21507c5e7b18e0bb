"""Runs step plans on the CPU (or with the reference kernels on any device), one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from loramux.kernels.compile_ahead import CompileAhead
from loramux.kernels.ops import Kernels
from loramux.lora.attach import LoraContext, attach
from loramux.lora.batch import LoraBatch, RowRun, gather_batch
from loramux.lora.extras import ExtrasSource, StepExtras
from loramux.lora.merge import PageDeltas
from loramux.lora.stacks import LoraStacks
from loramux.memory.pool import PagePool
from loramux.memory.records import ResidentAdapter
from loramux.models.decoder import Decoder, TorchDecoderOps
from loramux.models.packed_linear import PackedLinear
from loramux.runner.batch import (
    PagedAttention,
    StepBatch,
    build_batch,
    half_filled_pages,
    selected_rows,
    vanished_rows,
)
from loramux.runner.extras_ops import OpsWithExtras
from loramux.runner.in_flight import FinishedStep
from loramux.runner.jit_decoder import JitDecoder
from loramux.runner.logprobs import score
from loramux.runner.pooling import HiddenRows, pool
from loramux.runner.rank_memory import RankMemory
from loramux.runner.row_uses import accept
from loramux.runner.sampler import sample
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec
from loramux.types.step import BeforeChoice, InFlightStep, StepPlan, StepResult

_log = logging.getLogger(__name__)
# Steps wait for so long while weights are packed for kernels that were compiled late.
_PACK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Step:
    batch: StepBatch
    lora: LoraBatch | None
    extras: StepExtras | None


@dataclass(frozen=True, slots=True)
class LaterKernels:
    """Kernels that replace those of the first steps once they are compiled."""

    ahead: CompileAhead
    select: Callable[[], Kernels]


class CpuRunner(RankMemory):
    """The executor of a CPU; a step is finished when `launch` returns."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        linears: tuple[LinearSpec, ...],
        pool: PagePool,
        kv: KVLayout,
        kernels: Kernels,
        later: LaterKernels | None = None,
    ) -> None:
        super().__init__(pool, kv, adapter_dtype=decoder.dtype)
        self._later = later
        self._unpacked: Iterator[PackedLinear] | None = None
        self._decoder = decoder
        self._adapters: dict[str, ResidentAdapter] = {}
        self._extras = ExtrasSource(
            self.adapter_pages, self._adapters, linears, num_layers=decoder.config.num_layers
        )
        names = [linear.name for linear in linears]
        self._lora = attach(decoder.layers, names, kernels.lora)
        self._use(kernels)

    def _use(self, kernels: Kernels) -> None:
        """Compute the next steps with these kernels.

        All kernels read and write the same layouts of KV cache and adapters: running sequences go
        on. What they derive from adapters is made again.
        """
        self._kernels = kernels
        self._stacks = LoraStacks(self.adapter_pages, in_place=kernels.lora.READS_ADDRESSES)
        self._lora.kernels = kernels.lora
        self._compiled = (
            None
            if kernels.jit is None
            else JitDecoder(self._decoder, kernels.jit, self.kv, self.kv_pages)
        )

    @property
    def kernels(self) -> str:
        """The name of the kernels of the next step."""
        return self._kernels.name

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def lora(self) -> LoraContext:
        return self._lora

    @property
    def deltas(self) -> PageDeltas:
        """What the resident adapters add to the weights."""
        return PageDeltas(self._adapters, self.adapter_pages)

    @property
    def max_adapters(self) -> int | None:
        return None

    def add(self, adapter: ResidentAdapter) -> None:
        self._adapters[adapter.cid] = adapter

    def forget(self, cid: str) -> None:
        del self._adapters[cid]

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Return False: no step is ever in flight."""
        return False

    @property
    def is_lacking(self) -> bool:
        """Whether kernels have been compiled that the steps do not use yet."""
        return self._later is not None and self._later.ahead.is_done

    def prepare_next(self, *, only_wanted: bool) -> bool:
        """Change to the compiled kernels, then pack some weights for them at each call."""
        if self._later is None or not self._later.ahead.is_done:
            return False
        if self._unpacked is None:
            self._use(self._later.select())
            packed = (module for module in self._decoder.modules() if _is_unpacked(module))
            self._unpacked = cast(Iterator[PackedLinear], packed)
            return True
        ends_s = time.monotonic() + _PACK_S
        for linear in self._unpacked:
            linear.pack()
            if time.monotonic() > ends_s:
                return True
        seconds = time.monotonic() - self._later.ahead.began_s
        _log.warning("compiled CPU kernels are used from now on, %.0f s after the start", seconds)
        self._later = None
        return False

    def launch(self, plan: StepPlan, before_choice: BeforeChoice | None = None) -> InFlightStep:
        if before_choice is not None:
            before_choice()
        return FinishedStep(self.run(plan))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        step = self._build(plan)
        rows = None if self._compiled is None else selected_rows(step.batch)
        states = HiddenRows(self._forward(step, rows), rows)
        uses, logits_of = step.batch.uses, partial(self._logits, step)
        result = self._choose(step, states)
        for sequence_id, found in score(uses, states, logits_of, result.failed).items():
            result.logprobs[sequence_id] = found + result.logprobs.get(sequence_id, [])
        result.pooled.update(pool(uses, states, logits_of, result.failed))
        return result

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> dict[int, Tensor]:
        """Compute the logits of every token by sequence id, without sampling."""
        step = self._build(plan)
        batch = step.batch
        hidden = self._forward(step, None)
        logits = self._logits(step, hidden, range(batch.num_rows))
        return {
            chunk.sequence_id: logits[rows.start : rows.stop]
            for chunk, rows in ((c, batch.rows(i)) for i, c in enumerate(batch.chunks))
        }

    def _build(self, plan: StepPlan) -> _Step:
        chunks = list(plan.chunks)
        selections = [chunk.selection for chunk in chunks]
        is_merged = self._lora.merged is not None
        lora = None if is_merged else gather_batch(selections, self._adapters, self._stacks)
        if lora is not None:
            chunks.sort(key=lambda chunk: lora.order(chunk.selection))
        batch = build_batch(chunks, self.device)
        extras = None
        if lora is not None:
            runs = [
                RowRun(chunk.selection, start, start + len(chunk.token_ids))
                for start, chunk in zip(batch.row_starts, chunks, strict=True)
            ]
            lora.set_rows(runs, self._kernels.lora)
            extras = StepExtras.of(self._extras, runs)
        fresh = half_filled_pages(chunks, self.kv.block_tokens)
        if fresh:
            self.clear(fresh)
        return _Step(batch, lora, extras)

    def _forward(self, step: _Step, rows: Sequence[int] | None) -> Tensor:
        """Compute the hidden states of these rows (None: all)."""
        batch, lora, extras = step.batch, step.lora, step.extras
        inputs, device = (batch.token_ids, batch.positions), self.device
        self._lora.batch, self._lora.extras = lora, extras
        try:
            if self._compiled is None:
                assert rows is None, "only the compiled decoder selects rows"
                plan = self._kernels.attention.plan(batch.sequences, self.kv, device)
                attention = PagedAttention(plan, self.kv_pages)
                wrap = None if extras is None else partial(self._with_extras, extras)
                return cast(Tensor, self._decoder(*inputs, attention, wrap))
            if lora is not None and rows is not None:
                lora.keep_rows(rows, self._compiled.selecting_linears, self._kernels.lora)
            return self._compiled.hidden(*inputs, batch.sequences, rows, extras)
        finally:
            self._lora.batch = self._lora.extras = None

    def _with_extras(self, extras: StepExtras, ops: TorchDecoderOps) -> TorchDecoderOps:
        return OpsWithExtras(ops, extras, self._decoder)

    def _logits(self, step: _Step, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Compute the logits of these rows of the step from their hidden states."""
        if step.extras is None:
            return self._decoder.logits(hidden)
        decoder = self._decoder
        scaled = decoder.scaled(hidden)
        return step.extras.logits(scaled, rows, decoder.uncapped_logits, decoder.cap_logits)

    def _choose(self, step: _Step, states: HiddenRows) -> StepResult:
        """Sample from the hidden states of the sampled rows."""
        uses = step.batch.uses
        if not uses.sampled:
            return StepResult({})
        hidden = states.of(uses.sampled)
        output = sample(self._logits(step, hidden, uses.sampled), uses.samples)
        return accept(
            uses.sequence_ids,
            uses.drafts,
            output.token_ids,
            broken={*output.broken, *vanished_rows(hidden)},
            logprobs=output.logprobs,
        )


def _is_unpacked(module: torch.nn.Module) -> bool:
    return isinstance(module, PackedLinear) and not module.is_packed
