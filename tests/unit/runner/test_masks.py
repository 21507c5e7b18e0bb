"""Masks of constrained rows, in every method of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loramux.runner.sampler import sample
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow

VOCAB = 75
ALLOWED = {0, 31, 32, 63, 64, 74}


class FixedMask:
    """Allows the same tokens in each step."""

    error = None
    is_complete = False

    def __init__(self, token_ids: set[int], num_words: int = 3) -> None:
        bits = np.zeros(32 * num_words, dtype=np.uint8)
        bits[sorted(token_ids)] = 1
        self.allowed: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)

    def restricts(self, num_outputs: int) -> bool:
        return True

    def accept(self, token_id: int) -> None: ...


def row(constraint: FixedMask | None = None, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), 7, (1, 2), [3, 3], constraint)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 9.0},
        {"temperature": 9.0, "top_k": 3},
        {"temperature": 9.0, "top_k": 50},
        {"temperature": 9.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 9.0, "top_p": 0.5},
        {"temperature": 9.0, "top_p": 0.99, "min_p": 0.01},
        {"temperature": 9.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 2.0, "presence_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": {5: 100.0}},
    ],
)
def test_only_allowed_tokens_are_sampled_and_free_rows_are_not_changed(
    params: dict[str, Any],
) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    mask = FixedMask(ALLOWED)
    rows = [row(mask if i % 2 else None, seed=None, **params) for i in range(40)]
    rows = [SampleRow(r.params, 1000 + i, (1, 2), [3, 3], r.constraint) for i, r in enumerate(rows)]
    tokens = sample(logits, rows).token_ids
    assert set(tokens[1::2]) <= ALLOWED
    free = [SampleRow(r.params, r.seed, (1, 2), [3, 3]) for r in rows]
    assert sample(logits, free).token_ids[::2] == tokens[::2]
    assert torch.equal(logits, before)
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(40)]
    assert alone == tokens


def test_logprobs_are_of_the_logits_without_the_mask() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    held = sample(logits, [row(FixedMask({5}), temperature=0.0, logprobs=3)])
    free = sample(logits, [row(temperature=0.0, logprobs=3)])
    assert held.token_ids == [5]
    assert held.logprobs[0] is not None and free.logprobs[0] is not None
    assert held.logprobs[0].top == free.logprobs[0].top
    expected = torch.log_softmax(logits[0].double(), -1)[5].item()
    assert held.logprobs[0].logprob == pytest.approx(expected, abs=1e-5)


def test_logits_beyond_the_mask_are_not_allowed() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 70] = 50.0
    for rows in ([row(FixedMask({3}, 1), temperature=0.0)] * 2,
                 [row(FixedMask({3}, 1), temperature=0.0), row(temperature=0.0)]):  # fmt: skip
        assert sample(logits, rows).token_ids[0] == 3


def test_masks_of_several_widths_apply_in_one_batch() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 70] = 50.0
    rows = [row(FixedMask(ids, words), temperature=0.0) for ids, words in (({3}, 1), ({70}, 3))]
    assert sample(logits, [*rows, row(temperature=0.0)]).token_ids == [3, 70, 70]
