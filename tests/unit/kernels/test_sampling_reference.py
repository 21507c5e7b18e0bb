"""The reference of device sampling, against the sampler of the runner."""

from __future__ import annotations

import torch

from loramux.kernels.reference import sampling as sampling_torch
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


def test_rows_that_are_no_numbers_take_the_first_that_is_none() -> None:
    logits = torch.zeros(2, 20)
    logits[0, 7:] = float("nan")
    logits[1, 5] = float("inf")
    noise = torch.full((2,), 0.9, dtype=torch.float64)
    assert sampling_torch.choose_tokens(logits, torch.ones(2), noise).tolist() == [7, 5]
