"""Runs one plan: one forward for everybody, then one sampled token for each row that asked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loramux.kernels.interface import Kernels
from loramux.lora.attach import LoraContext, attach
from loramux.lora.batch import LoraBatch, RowRun, gather_batch
from loramux.lora.stacks import LoraStacks
from loramux.memory.pool import PagePool
from loramux.memory.records import ResidentAdapter
from loramux.models.decoder import Decoder
from loramux.runner.batch import (
    PagedAttention,
    StepBatch,
    build_batch,
    half_filled_pages,
    layout_of,
    prompt_logprobs_of,
)
from loramux.runner.flight import Flight, Landed
from loramux.runner.jit_decoder import JitDecoder
from loramux.runner.sampler import sample
from loramux.types import StepPlan, StepResult, TokenLogprob


class Runner:
    def __init__(
        self,
        *,
        decoder: Decoder,
        site_names: tuple[str, ...],
        pool: PagePool,
        adapters: Mapping[str, ResidentAdapter],
        kernels: Kernels,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._adapters = adapters
        self._kernels = kernels
        self._stacks = LoraStacks(pool, in_place=kernels.lora.READS_ADDRESSES)
        self._lora = attach(decoder.layers, site_names, kernels.lora)
        self._compiled = (
            None
            if kernels.fused is None
            else JitDecoder(decoder, kernels, layout_of(pool), pool.storage)
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._pool.storage.dtype

    @property
    def lora(self) -> LoraContext:
        return self._lora

    @property
    def pool_bytes(self) -> int:
        return self._pool.storage.nbytes

    @property
    def pool_address(self) -> int:
        return self._pool.storage.data_ptr()

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """No step is ever in flight here."""
        return False

    def launch(self, plan: StepPlan) -> Flight:
        return Landed(self.run(plan))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        batch, hidden = self._forward(plan)
        return self._choose(batch, hidden)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> dict[int, Tensor]:
        """The logits of every row, by sequence; for probes and tests."""
        batch, hidden = self._forward(plan)
        logits = self._decoder.logits(hidden)
        return {
            chunk.sequence_id: logits[rows.start : rows.stop]
            for chunk, rows in ((c, batch.rows(i)) for i, c in enumerate(batch.chunks))
        }

    def _forward(self, plan: StepPlan) -> tuple[StepBatch, Tensor]:
        selections = [chunk.selection for chunk in plan.chunks]
        is_merged = self._lora.merged is not None
        lora = None if is_merged else gather_batch(selections, self._adapters, self._stacks)
        batch = self._build(plan, lora)
        self._lora.batch = lora
        try:
            attention = PagedAttention(batch, self._pool, self._kernels.attention)
            if self._compiled is not None:
                rows = batch.token_ids, batch.positions
                return batch, self._compiled.hidden(*rows, attention.plan)
            return batch, self._decoder(batch.token_ids, batch.positions, attention)
        finally:
            self._lora.batch = None

    def _build(self, plan: StepPlan, lora: LoraBatch | None) -> StepBatch:
        chunks = list(plan.chunks)
        if lora is not None:
            chunks.sort(key=lambda chunk: lora.order(chunk.selection))
        batch = build_batch(chunks, self._pool.storage.device)
        if lora is not None:
            runs = [
                RowRun(chunk.selection, start, start + len(chunk.token_ids))
                for start, chunk in zip(batch.row_starts, chunks, strict=True)
            ]
            lora.set_rows(runs, self._kernels.lora)
        fresh = half_filled_pages(chunks, self._pool.geometry.block_tokens)
        if fresh:
            self._pool.clear(fresh)
        return batch

    def _choose(self, batch: StepBatch, hidden: Tensor) -> StepResult:
        sampled = [i for i, chunk in enumerate(batch.chunks) if chunk.sample is not None]
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprob] = {}
        if sampled:
            last_rows = torch.tensor([batch.rows(i)[-1] for i in sampled], device=hidden.device)
            logits = self._decoder.logits(hidden.index_select(0, last_rows))
            rows = [row for i in sampled if (row := batch.chunks[i].sample) is not None]
            output = sample(logits, rows)
            for i, token_id, logprob in zip(
                sampled, output.token_ids, output.logprobs, strict=True
            ):
                token_ids[batch.chunks[i].sequence_id] = token_id
                if logprob is not None:
                    logprobs[batch.chunks[i].sequence_id] = logprob
        return StepResult(
            token_ids, logprobs, prompt_logprobs_of(batch, hidden, self._decoder.logits)
        )
