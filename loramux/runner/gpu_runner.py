"""Runs step plans on a GPU: as one CUDA graph, or kernel by kernel where no graph fits."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loramux.errors import DoesNotFit
from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import DeviceKernels, SequenceRows
from loramux.lora.augmented_step import augmented_work
from loramux.lora.extras_step import ExtrasWork
from loramux.lora.graph_lora import GraphLora
from loramux.lora.segmented import (
    DeviceDirectory,
    LoraDevice,
    decode_work,
    prefill_graph_work,
    prefill_work,
)
from loramux.memory.device import (
    device_memory_bytes,
    is_out_of_memory,
    release_cached,
    wait_for,
)
from loramux.memory.pool import PagePool
from loramux.memory.records import ResidentAdapter
from loramux.models.decoder import Decoder
from loramux.runner.batch import (
    LogitsOf,
    StepBatch,
    build_batch,
)
from loramux.runner.captured_graphs import CapturedGraphs, Launch
from loramux.runner.decode_graphs import DecodeGraphs, DecodeLimits
from loramux.runner.gpu_decoder import GpuDecoder
from loramux.runner.gpu_sampler import (
    DeviceLogits,
    SampleInputs,
    can_sample_on_device,
    sample_inputs,
    sample_others,
)
from loramux.runner.in_flight import FinishedStep, LaunchedStep
from loramux.runner.logprobs import score
from loramux.runner.masks import full_masks, send_masks
from loramux.runner.pooling import HiddenRows, pool
from loramux.runner.prefill_graphs import PrefillGraphs
from loramux.runner.rank_memory import RankMemory
from loramux.runner.row_uses import RowUses, accept
from loramux.runner.split_plan import halves, join, with_known, without_drafts
from loramux.runner.step_graphs import Key
from loramux.types.kv import KVLayout
from loramux.types.request import Selection
from loramux.types.step import BeforeChoice, Chunk, InFlightStep, SampleRow, StepPlan, StepResult

Progress = Callable[[str, float], None]
AnyGraphs = CapturedGraphs[Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    max_batch_tokens: int
    max_sequences: int
    max_pages: int
    """Pages of the longest sequence."""


class GpuRunner(RankMemory):
    """The executor of one GPU, with CUDA graphs; launches steps ahead of their results."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: PagePool,
        kv: KVLayout,
        directory: DeviceDirectory,
        kernels: DeviceKernels,
        limits: BatchLimits,
    ) -> None:
        super().__init__(pool, kv, adapter_dtype=decoder.dtype)
        self.directory = directory
        self._kernels = kernels
        adapter_pages = self.adapter_pages.storage
        self._decoder = GpuDecoder(decoder, kernels, kv, self.kv_pages)
        lora = LoraDevice(
            kernels=kernels.lora,
            directory=directory,
            num_layers=kv.num_layers,
            pool=adapter_pages,
            num_sms=kernels.num_sms,
        )
        self._extras = None
        if directory.extras is not None:
            sites, num_sms = directory.sites, kernels.num_sms
            self._extras = ExtrasWork(
                kernels.extras, directory.extras, sites, adapter_pages, num_sms
            )
        self._prefill_lora = prefill_work(lora, limits.max_batch_tokens)
        decodes = decode_work(lora, limits.max_sequences, use_pdl=kernels.supports_pdl)
        rows = prefill_graph_work(lora, limits.max_batch_tokens, use_pdl=kernels.supports_pdl)
        self._augmented = augmented_work(decodes, self._decoder.appended, kernels.augmented)
        self.decode_graphs = DecodeGraphs(
            self._decoder,
            kernels,
            GraphLora(decodes, self._augmented),
            DecodeLimits(max_sequences=limits.max_sequences, max_pages=limits.max_pages),
            pool.device,
            self._extras,
        )
        self._token_buffer = self.decode_graphs.token_buffer
        self.prefill_graphs = PrefillGraphs(
            self._decoder,
            kernels,
            GraphLora(rows, None if self._augmented is None else self._augmented.over(rows)),
            self._token_buffer,
            pool.device,
            max_tokens=limits.max_batch_tokens,
            max_sequences=limits.max_sequences,
            max_pages=limits.max_pages,
            extras=self._extras,
        )
        self._graph_kinds: tuple[AnyGraphs, ...] = (self.decode_graphs, self.prefill_graphs)
        self._todo: list[tuple[AnyGraphs, Key]] | None = None
        self._can_capture = True
        self._last: InFlightStep | None = None
        self._launches: list[tuple[AnyGraphs | None, Sequence[Chunk]]] = []
        # Most tokens of one launch; halved when a step runs out of memory.
        self._max_tokens = limits.max_batch_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def max_adapters(self) -> int | None:
        return self.directory.max_adapters

    def add(self, adapter: ResidentAdapter) -> None:
        self.directory.add(adapter)

    def forget(self, cid: str) -> None:
        slot = self.directory.remove(cid)
        if slot is not None and self._augmented is not None:
            self._augmented.cache.forget(slot)

    def capture(self, progress: Progress | None = None) -> None:
        """Capture all graphs; without it `prepare_next` captures them one by one."""
        # Prefill first: its largest graph takes the most memory, which the others reuse.
        kinds: tuple[AnyGraphs, ...] = (self.prefill_graphs, self.decode_graphs)
        todo = [(graphs, key) for graphs in kinds for key in graphs.keys]
        self._capture(todo, progress)

    def capture_largest(self, progress: Progress | None = None) -> None:
        """Capture the largest graphs, which every step can run on.

        They take nearly the memory of all graphs together.
        """
        kinds: tuple[AnyGraphs, ...] = (self.prefill_graphs, self.decode_graphs)
        self._capture([(graphs, key) for graphs in kinds for key in graphs.largest], progress)

    def _capture(self, todo: Sequence[tuple[AnyGraphs, Key]], progress: Progress | None) -> None:
        if self._augmented is not None:
            self._augmented.warm_up()
        for number, (graphs, key) in enumerate(todo):
            graphs.capture(key)
            if progress is not None:
                progress("Capturing graphs", (number + 1) / len(todo))

    @property
    def kernels(self) -> str:
        return "triton"

    @property
    def is_lacking(self) -> bool:
        """Whether steps ran on larger graphs because their own are not captured."""
        return self._can_capture and any(
            graphs.graphs.wanted is not None for graphs in self._graph_kinds
        )

    @torch.inference_mode()
    def prepare_next(self, *, only_wanted: bool) -> bool:
        """Capture one more graph; return False if there is none to capture.

        `only_wanted`: one that a step has lacked. No step may be in flight.
        """
        found = self._next_graph(only_wanted=only_wanted) if self._can_capture else None
        if found is None:
            return False
        graphs, key = found
        # The first run of the new graph overwrites the tokens of the last step.
        self._token_buffer.forget()
        try:
            graphs.capture(key)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # Steps go on with the graphs that there are.
            self._can_capture = False
            release_cached(self.device)
            _log.warning("no memory for more CUDA graphs: %s", error)
        return self._can_capture

    def _next_graph(self, *, only_wanted: bool) -> tuple[AnyGraphs, Key] | None:
        for graphs in self._graph_kinds:
            if (wanted := graphs.graphs.wanted) is not None:
                return graphs, wanted
        if only_wanted:
            return None
        if self._todo is None:
            # Small steps first, of both kinds: those are the first that users see.
            self._todo = sorted(
                ((graphs, key) for graphs in self._graph_kinds for key in graphs.keys),
                key=lambda pair: -pair[1][0],
            )
        while self._todo:
            graphs, key = self._todo.pop()
            if not graphs.graphs.is_ready(key):
                return graphs, key
        return None

    @torch.inference_mode()
    def dry_run(self, plans: Sequence[StepPlan]) -> None:
        """Launch the kernels of all graphs and of these steps once, over few layers.

        For a dry run that collects the kernels: what it computes is not used.
        """
        if self._augmented is not None:
            self._augmented.warm_up()
        with self._decoder.distinct_layers():
            for graphs in self._graph_kinds:
                for key in graphs.keys:
                    graphs.dry_run(key)
            self.warm_up(plans)

    @torch.inference_mode()
    def warm_up(self, plans: Sequence[StepPlan]) -> None:
        """Compile the kernels of such steps, with and without LoRA, before requests arrive."""
        for plan in plans:
            for has_lora in (False, True):
                self._launch(plan, has_lora=has_lora)
        for graphs in self._graph_kinds:
            logits = graphs.first_logits
            logits.choose_masked(self._kernels.sampling, full_masks(logits.logits))

    def trace(self) -> list[Launch]:
        """Return the launches of the last step: one, or several if it was split for memory."""
        return [
            Launch(None, None, chunks) if graphs is None else graphs.describe_launch(chunks)
            for graphs, chunks in self._launches
        ]

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Return whether the plan can be launched before the last step's tokens are known.

        Masks may depend on these tokens: they are read after the forward pass was launched.
        """
        return all(
            type(rows.use) is SampleRow and can_sample_on_device(rows.use.params)
            for chunk in plan.chunks
            for rows in chunk.rows
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan, before_choice: BeforeChoice | None = None) -> InFlightStep:
        """Launch a step; wait for the device only if the step cannot run ahead."""
        self._launches = []
        step = self._launch_graph(plan, before_choice)
        if step is None:
            step = self._launch_in_parts(plan, before_choice)
        if step.is_done:
            self._token_buffer.forget()
        self._last = step
        return step

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> dict[int, Tensor]:
        """Compute the logits of every token by sequence id, without sampling."""
        has_lora = any(chunk.selection for chunk in plan.chunks)
        batch, hidden = self._forward(plan, has_lora=has_lora)
        chunks = batch.chunks
        logits = self._logits(
            hidden, [c.selection for c in chunks], [len(c.token_ids) for c in chunks]
        )
        # The caller may release the pages at once.
        wait_for(self.device)
        return {
            chunk.sequence_id: logits[batch.rows(i).start : batch.rows(i).stop]
            for i, chunk in enumerate(batch.chunks)
        }

    def _launch_graph(
        self, plan: StepPlan, before_choice: BeforeChoice | None
    ) -> InFlightStep | None:
        chunks = sorted(plan.chunks, key=lambda chunk: self.directory.order(chunk.selection))
        uses = RowUses.of(chunks)
        if not uses.is_sampled_only:
            return None
        samples = sample_inputs(uses.samples)
        try:
            graphs: AnyGraphs = self.decode_graphs
            logits = graphs.launch(chunks, uses, samples)
            if logits is None:
                graphs = self.prefill_graphs
                logits = graphs.launch(chunks, uses, samples)
            if logits is None:
                return None
            self._launches.append((graphs, chunks))
            self._apply_masks(logits, uses.samples, samples, before_choice)
            step = self._token_buffer.publish(uses.sequence_ids, uses.drafts)
            return self._finish(step, logits, uses, samples) if samples.others else step
        except RuntimeError as error:
            # Graphs allocate no memory, but the full sampler does.
            if not is_out_of_memory(error):
                raise
            release_cached(self.device)
        # The token buffer already holds this step's tokens.
        return self._launch_in_parts(self._with_known(plan), before_choice)

    def _apply_masks(
        self,
        logits: DeviceLogits,
        rows: Sequence[SampleRow],
        samples: SampleInputs,
        before_choice: BeforeChoice | None,
    ) -> None:
        """Sample the rows with a mask again, with their masks of this step.

        The forward pass runs while `before_choice` computes them.
        """
        if before_choice is not None:
            before_choice()
        masked = send_masks(rows, samples.masked, self.device) if samples.masked else None
        if masked is not None:
            tokens = logits.choose_masked(self._kernels.sampling, masked)
            self._token_buffer.replace(masked.rows, tokens)

    def _with_known(self, plan: StepPlan) -> StepPlan:
        return with_known(plan, {} if self._last is None else self._last.result().accepted)

    def _finish(
        self,
        step: LaunchedStep,
        logits: DeviceLogits,
        uses: RowUses,
        samples: SampleInputs,
    ) -> FinishedStep:
        token_ids, broken = step.tokens()
        output = sample_others(token_ids, logits.logits, uses.samples, samples.others)
        return FinishedStep(
            accept(
                uses.sequence_ids,
                uses.drafts,
                output.token_ids,
                broken={*broken, *output.broken},
                logprobs=output.logprobs,
            )
        )

    def _launch_in_parts(self, plan: StepPlan, before_choice: BeforeChoice | None) -> InFlightStep:
        """Launch a step, split into halves until each fits in memory.

        Keys and values that a failed attempt has written are overwritten with the same values.
        """
        if plan.num_tokens <= self._max_tokens or plan.num_tokens == 1:
            try:
                has_lora = any(chunk.selection for chunk in plan.chunks)
                return self._launch(plan, has_lora=has_lora, before_choice=before_choice)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            release_cached(self.device)
            if plan.num_tokens == 1:
                raise DoesNotFit(self._no_memory(message))
            self._max_tokens = max(1, min(self._max_tokens, plan.num_tokens) // 2)
        # The first half overwrites tokens in the token buffer that the second half needs.
        known = self._with_known(plan)
        plain = without_drafts(known)
        if plain.num_tokens < known.num_tokens:
            return self._launch_in_parts(plain, before_choice)
        first, second = halves(known)
        return FinishedStep(
            join(
                self._launch_in_parts(first, before_choice).result(),
                self._launch_in_parts(second, before_choice).result(),
            )
        )

    def _no_memory(self, message: str) -> str:
        free, total = device_memory_bytes(self.device)
        return (
            f"The device has no memory for a step of one token: {free} of {total} bytes are free, "
            f"{self.pool_bytes} are the pool's. Serve with a smaller pool. ({message})"
        )

    def _launch(
        self, plan: StepPlan, *, has_lora: bool, before_choice: BeforeChoice | None = None
    ) -> InFlightStep:
        batch, hidden = self._forward(plan, has_lora=has_lora)
        self._launches.append((None, batch.chunks))
        uses, states = batch.uses, HiddenRows(hidden, None)
        failed: dict[int, str] = {}
        logprobs = score(uses, states, self._logits_of(batch), failed)
        pooled = pool(uses, states, self._logits_of(batch), failed)
        if not uses.sampled:
            return (
                FinishedStep(StepResult({}, logprobs, failed, pooled))
                if logprobs or pooled
                else self._token_buffer.publish([])
            )
        selections = uses.selections
        sampled = hidden.index_select(0, send(torch.tensor(uses.sampled), hidden.device))
        samples = sample_inputs(uses.samples)
        found = self._logits(sampled, selections, [1] * len(selections))
        logits = DeviceLogits.of(found, samples)
        self._token_buffer.store(logits.choose(self._kernels.sampling))
        self._apply_masks(logits, uses.samples, samples, before_choice)
        step = self._token_buffer.publish(uses.sequence_ids, uses.drafts)
        if not samples.others and uses.is_sampled_only:
            return step
        result = self._finish(step, logits, uses, samples).result()
        for sequence_id, described in logprobs.items():
            result.logprobs[sequence_id] = described + result.logprobs.get(sequence_id, [])
        return FinishedStep(replace(result, failed=failed | result.failed, pooled=pooled))

    def _forward(self, plan: StepPlan, *, has_lora: bool) -> tuple[StepBatch, Tensor]:
        chunks = sorted(plan.chunks, key=lambda chunk: self.directory.order(chunk.selection))
        device = self.device
        batch = build_batch(chunks, device)
        self._token_buffer.fill_in(chunks, batch.row_starts, batch.token_ids)
        sequences = [
            SequenceRows(start, len(chunk.token_ids), chunk.start, chunk.page_ids)
            for start, chunk in zip(batch.row_starts, chunks, strict=True)
        ]
        attention = self._kernels.attention.plan(sequences, self._decoder.layout, device)
        lora = self._prefill_lora if has_lora else None
        if lora is not None:
            lora.fill_now([c.selection for c in chunks], [len(c.token_ids) for c in chunks])
        extras = None
        if lora is not None and self._extras is not None:
            selections = [c.selection for c in chunks]
            extras = self._extras.step_now(selections, [len(c.token_ids) for c in chunks])
        hidden = self._decoder.hidden(batch.token_ids, batch.positions, attention, lora, extras)
        return batch, hidden

    def _logits(
        self, hidden: Tensor, selections: Sequence[Selection], lengths: Sequence[int]
    ) -> Tensor:
        """Return the logits [tokens, vocab] of the next lengths[i] tokens with selection i, in
        float32.

        If an adapter adds tokens to the vocabulary, those of other sequences are -inf there.
        """
        extras = None if self._extras is None else self._extras.step_now(selections, lengths)
        if extras is None or self._extras is None:
            return self._decoder.logits(hidden)
        num_columns = self._extras.directory.num_columns(selections)
        return self._decoder.logits(hidden, extras, num_columns)

    def _logits_of(self, batch: StepBatch) -> LogitsOf:
        """Return the logits of adjacent rows of one sequence."""

        def logits_of(some: Tensor, rows: Sequence[int]) -> Tensor:
            if self._extras is None:
                return self._decoder.logits(some)
            chunk = batch.chunks[bisect_right(batch.row_starts, rows[0]) - 1]
            return self._logits(some, [chunk.selection], [len(rows)])

        return logits_of
