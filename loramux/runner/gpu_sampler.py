"""Samples on the device where a kernel can, and with the full sampler otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.kernels.sampling_ops import MaskedRows, SamplingOps
from loramux.runner.penalties import changes_logits
from loramux.runner.sampler import SampleOutput, sample, uniform
from loramux.types.request import TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Inputs of the sampling kernel; 0 and 0 for rows that it cannot sample."""

    temperatures: list[float]
    noise: list[float]
    others: list[int]
    """Rows that need the full sampler."""
    masked: list[int] = field(default_factory=list)
    """Rows that the kernel samples with a mask, which is known after the forward pass began."""


def can_sample_on_device(params: SamplingParams) -> bool:
    """Return whether the kernel can sample: greedy, or by a temperature alone."""
    is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if params.logprobs is not None or changes_logits(params):
        return False
    return params.is_greedy or not is_filtered


def sample_inputs(rows: Sequence[SampleRow]) -> SampleInputs:
    """Prepare the kernel's inputs for these rows."""
    others, masked = [], []
    for i, row in enumerate(rows):
        if not can_sample_on_device(row.params):
            others.append(i)
        # Without the property for rows without a constraint: every step asks for every row.
        elif row.constraint is not None and row.is_constrained:
            masked.append(i)
    temperatures = [row.params.temperature for row in rows]
    for i in others:
        temperatures[i] = 0.0
    noise = [
        uniform(row.seed, len(row.output_token_ids)) if temperature else 0.0
        for row, temperature in zip(rows, temperatures, strict=True)
    ]
    return SampleInputs(temperatures, noise, others, masked)


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    """The logits of a step and the kernel's inputs for their rows, on the device."""

    logits: Tensor
    """[rows, vocab]"""
    temperatures: Tensor
    """[rows] float32"""
    noise: Tensor
    """[rows] float64"""

    @classmethod
    def of(cls, logits: Tensor, samples: SampleInputs) -> Self:
        numbers = torch.tensor([samples.temperatures, samples.noise], dtype=torch.float64)
        temperatures, noise = send(numbers, logits.device)
        return cls(logits, temperatures.float(), noise)

    def choose(self, ops: SamplingOps) -> Tensor:
        """Sample one token per row: [rows], see `choose_tokens`; arbitrary for rows in `others`."""
        return ops.choose_tokens(self.logits, self.temperatures, self.noise)

    def choose_masked(self, ops: SamplingOps, masked: MaskedRows) -> Tensor:
        """Sample the tokens of the masked rows: [masked]"""
        return ops.choose_masked_tokens(self.logits, self.temperatures, self.noise, masked)


def sample_others(
    token_ids: list[int], logits: Tensor, rows: Sequence[SampleRow], others: Sequence[int]
) -> SampleOutput:
    """Replace the tokens of `others` by those of the full sampler, and add logprobs."""
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    broken: list[int] = []
    if others:
        own = logits[torch.tensor(others, device=logits.device)].float()
        output = sample(own, [rows[i] for i in others])
        for i, token_id, logprob in zip(others, output.token_ids, output.logprobs, strict=True):
            token_ids[i], logprobs[i] = token_id, logprob
        broken = [others[place] for place in output.broken]
    return SampleOutput(token_ids, logprobs, broken)
