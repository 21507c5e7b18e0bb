from __future__ import annotations

from typing import Any

import pytest
import torch

from loramux.engine.grammar.constraint import Constraint
from loramux.kernels.reference import sampling as sampling_torch
from loramux.runner.gpu_sampler import (
    DeviceLogits,
    can_sample_on_device,
    sample_inputs,
    sample_others,
)
from loramux.runner.sampler import sample
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow


def row(seed: int = 3, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, (1, 2), (3,))


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 4, "top_p": 0.5}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_k": 4}, False),
        ({"temperature": 0.7, "top_p": 0.9}, False),
        ({"temperature": 0.7, "min_p": 0.1}, False),
        ({"temperature": 0.0, "logprobs": 0}, False),
        ({"temperature": 0.0, "presence_penalty": 1.0}, False),
        ({"temperature": 0.0, "logit_bias": {1: 2.0}}, False),
    ],
)
def test_temperature_alone_is_sampled_on_the_device(params: dict[str, Any], plain: bool) -> None:
    assert can_sample_on_device(SamplingParams(**params)) is plain


def test_mixed_rows_get_the_tokens_of_the_full_sampler() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    rows = [
        row(temperature=0.0),
        row(temperature=1.0, top_p=0.4),
        row(seed=9, temperature=1.3),
        row(temperature=0.0, logprobs=2),
        row(seed=2, temperature=0.6),
        row(temperature=0.0, frequency_penalty=2.0),
    ]
    samples = sample_inputs(rows)
    chosen = DeviceLogits.of(logits, samples).choose(sampling_torch).tolist()
    found, expected = sample_others(chosen, logits, rows, samples.others), sample(logits, rows)
    assert found.token_ids == expected.token_ids
    assert [one is None for one in found.logprobs] == [one is None for one in expected.logprobs]


def test_rows_of_the_full_sampler_are_greedy_in_the_kernel() -> None:
    samples = sample_inputs([row(temperature=1.0, top_k=3), row(temperature=0.5)])
    assert samples.temperatures == [0.0, 0.5] and samples.others == [0]
    assert samples.noise[0] == 0.0 and 0 < samples.noise[1] < 1


def test_a_row_is_masked_while_its_constraint_restricts_it() -> None:
    params = SamplingParams(temperature=0.5, min_tokens=2)
    constraint = Constraint(params, (5,), None, vocab_size=64)
    rows = [
        SampleRow(params, 0, (1,), output_token_ids=[0] * length, constraint=constraint)
        for length in (1, 2)
    ]
    samples = sample_inputs(rows)
    assert samples.masked == [0] and samples.others == []
    assert samples.temperatures == [0.5, 0.5]


def test_a_row_of_the_full_sampler_gets_its_mask_there() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, min_tokens=2)
    constraint = Constraint(params, (5,), None, vocab_size=64)
    samples = sample_inputs([SampleRow(params, 0, (1,), [], constraint)])
    assert samples.masked == [] and samples.others == [0]
