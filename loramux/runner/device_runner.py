"""Runs one plan on a GPU: decode steps as one graph, all others kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.errors import DoesNotFit
from loramux.kernels.interface import PagedLayout, SequenceRows
from loramux.lora.device_work import DeviceDirectory, LoraDevice, decode_work, prompt_work
from loramux.lora.tail_work import tail_work
from loramux.memory.device import device_memory_bytes, is_out_of_memory, release_cached
from loramux.memory.pool import PagePool
from loramux.models.decoder import Decoder
from loramux.runner.batch import StepBatch, build_batch, prompt_logprobs_of
from loramux.runner.decode_graphs import DecodeGraphs, DecodeLimits, Progress, is_decode
from loramux.runner.device_sampler import choose
from loramux.runner.fused_decoder import DeviceKernels, FusedDecoder
from loramux.runner.sampler import SampleOutput
from loramux.runner.split_plan import halves, join
from loramux.types import SampleRow, StepPlan, StepResult, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    max_batch_tokens: int
    max_sequences: int
    max_pages: int
    """Of one sequence."""


class DeviceRunner:
    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: PagePool,
        directory: DeviceDirectory,
        kernels: DeviceKernels,
        limits: DeviceLimits,
    ) -> None:
        self._pool = pool
        self.directory = directory
        self._kernels = kernels
        geometry = pool.geometry
        layout = PagedLayout(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=geometry.block_tokens,
        )
        self._decoder = FusedDecoder(decoder, kernels, layout, pool.storage)
        lora = LoraDevice(
            kernels=kernels.lora,
            directory=directory,
            num_layers=geometry.num_layers,
            pool=pool.storage,
            num_multiprocessors=kernels.num_multiprocessors,
        )
        self._prompt_lora = prompt_work(lora, limits.max_batch_tokens)
        decodes = decode_work(lora, limits.max_sequences, use_pdl=kernels.overlaps_launches)
        self._graphs = DecodeGraphs(
            self._decoder,
            kernels,
            decodes,
            DecodeLimits(max_sequences=limits.max_sequences, max_pages=limits.max_pages),
            pool.device,
            tail_work(decodes, self._decoder.tails, kernels.tail),
        )
        # Rows that a step may have; fewer after one ran out of memory.
        self._max_rows = limits.max_batch_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self._pool.storage.dtype

    @property
    def is_gpu(self) -> bool:
        return self._pool.device.type == "cuda"

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def pool_bytes(self) -> int:
        return self._pool.storage.nbytes

    @property
    def pool_address(self) -> int:
        return self._pool.storage.data_ptr()

    def capture(self, progress: Progress | None = None) -> None:
        """Makes the graphs of decode steps; without it each is made when first needed."""
        self._graphs.capture(progress)

    def capture_largest(self) -> None:
        """Takes the memory that all graphs together will take, or nearly."""
        self._graphs.capture_largest()

    @torch.inference_mode()
    def warm_up(self, plans: Sequence[StepPlan]) -> None:
        """Compiles the kernels of such steps, with LoRA and without: no request waits for it."""
        for plan in plans:
            for has_lora in (False, True):
                self._run(plan, has_lora=has_lora)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        result = None
        if all(is_decode(chunk) for chunk in plan.chunks):
            result = self._run_graph(plan)
        return self._run_in_parts(plan) if result is None else result

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> dict[int, Tensor]:
        """The logits of every row, by sequence; for probes and tests."""
        has_lora = any(chunk.selection for chunk in plan.chunks)
        batch, hidden = self._forward(plan, has_lora=has_lora)
        logits = self._decoder.logits(hidden)
        return {
            chunk.sequence_id: logits[batch.rows(i).start : batch.rows(i).stop]
            for i, chunk in enumerate(batch.chunks)
        }

    def _run_graph(self, plan: StepPlan) -> StepResult | None:
        chunks = sorted(plan.chunks, key=lambda chunk: self.directory.order(chunk.selection))
        rows = [chunk.sample for chunk in chunks if chunk.sample is not None]
        try:
            output = self._graphs.run(chunks, rows)
        except RuntimeError as error:
            # A graph takes no memory, but the full sampler does.
            if not is_out_of_memory(error):
                raise
            release_cached(self._pool.device)
            return None
        if output is None:
            return None
        return _result([chunk.sequence_id for chunk in chunks], output, {})

    def _run_in_parts(self, plan: StepPlan) -> StepResult:
        """A step that needs more memory than there is becomes two, again and again.

        What it has written of keys and values until then is written once more, the same.
        """
        if plan.num_tokens <= self._max_rows or plan.num_tokens == 1:
            try:
                return self._run(plan, has_lora=any(chunk.selection for chunk in plan.chunks))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            release_cached(self._pool.device)
            if plan.num_tokens == 1:
                raise DoesNotFit(self._no_memory(message))
            self._max_rows = max(1, min(self._max_rows, plan.num_tokens) // 2)
        first, second = halves(plan)
        return join(self._run_in_parts(first), self._run_in_parts(second))

    def _no_memory(self, message: str) -> str:
        free, total = device_memory_bytes(self._pool.device)
        return (
            f"The device has no memory for a step of one row: {free} of {total} bytes are free, "
            f"{self.pool_bytes} are the pool's. Serve with a smaller pool. ({message})"
        )

    def _run(self, plan: StepPlan, *, has_lora: bool) -> StepResult:
        batch, hidden = self._forward(plan, has_lora=has_lora)
        sampled = [i for i, chunk in enumerate(batch.chunks) if chunk.sample is not None]
        output = SampleOutput([], [])
        if sampled:
            last_rows = torch.tensor([batch.rows(i)[-1] for i in sampled], device=hidden.device)
            logits = self._decoder.logits(hidden.index_select(0, last_rows))
            rows: list[SampleRow] = [
                row for i in sampled if (row := batch.chunks[i].sample) is not None
            ]
            output = choose(logits, rows, self._kernels.sampling)
        sequence_ids = [batch.chunks[i].sequence_id for i in sampled]
        return _result(
            sequence_ids, output, prompt_logprobs_of(batch, hidden, self._decoder.logits)
        )

    def _forward(self, plan: StepPlan, *, has_lora: bool) -> tuple[StepBatch, Tensor]:
        chunks = sorted(plan.chunks, key=lambda chunk: self.directory.order(chunk.selection))
        device = self._pool.device
        batch = build_batch(chunks, device)
        sequences = [
            SequenceRows(start, len(chunk.token_ids), chunk.start, chunk.page_ids)
            for start, chunk in zip(batch.row_starts, chunks, strict=True)
        ]
        attention = self._kernels.attention.plan(sequences, self._decoder.layout, device)
        lora = self._prompt_lora if has_lora else None
        if lora is not None:
            lora.fill_now([c.selection for c in chunks], [len(c.token_ids) for c in chunks])
        return batch, self._decoder.hidden(batch.token_ids, batch.positions, attention, lora)


def _result(
    sequence_ids: Sequence[int],
    output: SampleOutput,
    prompt_logprobs: dict[int, list[TokenLogprob]],
) -> StepResult:
    logprobs = {
        sequence_id: logprob
        for sequence_id, logprob in zip(sequence_ids, output.logprobs, strict=True)
        if logprob is not None
    }
    token_ids = dict(zip(sequence_ids, output.token_ids, strict=True))
    return StepResult(token_ids, logprobs, prompt_logprobs)
