"""Which rows a kernel samples on the device, and the full sampler for all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.kernels.ops import SamplingOps
from loramux.runner.penalties import changes_logits
from loramux.runner.sampler import SampleOutput, sample, uniform
from loramux.types.request import TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow


@dataclass(frozen=True, slots=True)
class Draws:
    """What the kernel needs of each row: 0 and 0 of those that it cannot sample."""

    temperatures: list[float]
    noise: list[float]
    others: list[int]
    """Rows for the full sampler."""


def is_plain(params: SamplingParams) -> bool:
    """A temperature alone, or none: what choose_tokens can do."""
    is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if params.logprobs is not None or changes_logits(params):
        return False
    return params.is_greedy or not is_filtered


def draw(rows: Sequence[SampleRow]) -> Draws:
    others = [i for i, row in enumerate(rows) if not is_plain(row.params)]
    temperatures = [row.params.temperature for row in rows]
    for i in others:
        temperatures[i] = 0.0
    noise = [
        uniform(row.seed, len(row.output_token_ids)) if temperature else 0.0
        for row, temperature in zip(rows, temperatures, strict=True)
    ]
    return Draws(temperatures, noise, others)


def choose(logits: Tensor, draws: Draws, ops: SamplingOps) -> Tensor:
    """One token per row, [rows]; any for those that need the full sampler. logits [rows, vocab]"""
    numbers = torch.tensor([draws.temperatures, draws.noise], dtype=torch.float64)
    temperatures, noise = send(numbers, logits.device)
    return ops.choose_tokens(logits, temperatures.float(), noise)


def finish(
    token_ids: list[int], logits: Tensor, rows: Sequence[SampleRow], others: Sequence[int]
) -> SampleOutput:
    """The kernel's tokens, with those in their place that it could not choose."""
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    if others:
        own = logits[torch.tensor(others, device=logits.device)].float()
        output = sample(own, [rows[i] for i in others])
        for i, token_id, logprob in zip(others, output.token_ids, output.logprobs, strict=True):
            token_ids[i], logprobs[i] = token_id, logprob
    return SampleOutput(token_ids, logprobs)
