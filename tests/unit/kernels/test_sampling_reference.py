"""The reference of device sampling, against the sampler of the runner."""

from __future__ import annotations

import numpy as np
import torch

from loramux.kernels.reference import sampling as sampling_torch
from loramux.kernels.reference.sampling import NO_TOKEN
from loramux.kernels.sampling_ops import MaskedRows
from loramux.runner.sampler import sample, uniform
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow


def test_the_same_seed_gives_the_runners_tokens() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    rows = [
        SampleRow(
            params=SamplingParams(temperature=temperature),
            seed=seed,
            prompt_token_ids=(),
            output_token_ids=(1,) * seed,
        )
        for seed in range(10)
        for temperature in (0.0, 0.3, 1.0, 1.7)
    ]
    temperatures = torch.tensor([row.params.temperature for row in rows])
    noise = torch.tensor(
        [uniform(row.seed, len(row.output_token_ids)) for row in rows], dtype=torch.float64
    )
    chosen = sampling_torch.choose_tokens(logits, temperatures, noise)
    assert chosen.tolist() == sample(logits, rows).token_ids


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.full((2, 50), float("-inf"))
    logits[:, 10:20] = 0.0
    noise = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    chosen = sampling_torch.choose_tokens(logits, torch.ones(2), noise)
    assert chosen.tolist() == [10, 19]


def test_rows_that_are_not_finite_take_their_first_such_token_and_are_marked() -> None:
    logits = torch.zeros(4, 20)
    logits[0, 7:] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    noise = torch.full((4,), 0.9, dtype=torch.float64)
    tokens = sampling_torch.choose_tokens(logits, torch.ones(4), noise)
    assert (tokens % NO_TOKEN).tolist() == [7, 5, 0, 18]
    assert (tokens >= NO_TOKEN).tolist() == [True, True, True, False]


def test_masked_rows_take_the_tokens_of_logits_without_the_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 75, generator=generator) * 2
    temperatures, noise = (
        torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0]),
        torch.rand(5, dtype=torch.float64),
    )
    rows = [4, 0, 3]
    # A mask of two words: tokens from 64 on are not allowed.
    bits = torch.rand(3, 64, generator=generator) < 0.3
    masks = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little")).view(torch.int32)
    masked = MaskedRows(torch.tensor(rows, dtype=torch.int32), masks)
    found = sampling_torch.choose_masked_tokens(logits, temperatures, noise, masked)
    for number, row in enumerate(rows):
        own = torch.full((1, 75), -torch.inf)
        own[0, :64] = logits[row, :64].masked_fill(~bits[number], -torch.inf)
        one = slice(row, row + 1)
        expected = sampling_torch.choose_tokens(own, temperatures[one], noise[one])
        assert found[number] == expected[0] and bits[number, found[number]]
