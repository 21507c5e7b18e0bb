"""Device sampling, in Triton's interpreter, against its torch reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu import sampling as sampling_triton
from loramux.kernels.reference import sampling as sampling_torch
from loramux.kernels.reference.sampling import NO_TOKEN
from loramux.kernels.sampling_ops import MaskedRows

VOCAB = sampling_triton.PART + 700
"""Two parts, the second not full."""


def check(logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor) -> None:
    expected = sampling_torch.choose_tokens(logits, temperatures, noise)
    actual = sampling_triton.choose_tokens(logits, temperatures, noise)
    assert actual.tolist() == expected.tolist()


def test_draws_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, VOCAB, generator=generator) * 3
    temperatures = torch.tensor([0.0, 0.2, 0.7, 1.0, 1.0, 1.5, 3.0, 0.0])
    check(logits, temperatures, torch.rand(8, generator=generator, dtype=torch.float64))


def test_of_equal_ones_the_first_is_taken() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [900, 4200]] = 1.0
    logits[1, [4300, 4200]] = 1.0
    tokens = sampling_triton.choose_tokens(
        logits, torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    )
    assert tokens.tolist() == [900, 4200]


def test_the_first_of_a_group_is_taken() -> None:
    """Catches a group's first column in place of its best, and numbers before what is none."""
    logits = torch.zeros(5, VOCAB)
    logits[0, [905, 907]] = 1.0
    logits[1, [5, 4101]] = 1.0
    logits[2, [13, 15]] = float("nan")
    logits[3, 14], logits[3, 15] = float("nan"), float("inf")
    logits[4, VOCAB - 1] = 1.0
    check(logits, torch.zeros(5), torch.zeros(5, dtype=torch.float64))
    tokens = sampling_triton.choose_tokens(
        logits, torch.ones(5), torch.zeros(5, dtype=torch.float64)
    )
    assert tokens[2:4].tolist() == [13 + NO_TOKEN, 14 + NO_TOKEN]


@pytest.mark.parametrize("vocab", [5, sampling_triton.PART - 3, sampling_triton.PART + 1])
def test_no_token_is_beyond_the_vocabulary(vocab: int) -> None:
    """The last group is not full, and all before it is worth as little as what is not there."""
    logits = torch.full((2, vocab), float("-inf"))
    logits[1, -1] = 0.0
    noise = torch.full((2,), 0.5, dtype=torch.float64)
    for temperatures in (torch.zeros(2), torch.ones(2)):
        check(logits, temperatures, noise)


def test_odd_rows_equal_the_reference() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0] = float("nan")
    logits[1, 77] = float("inf")
    logits[2] = float("-inf")
    logits[3, : sampling_triton.PART + 5] = float("-inf")
    logits[4, 100:] = float("-inf")
    noise = torch.tensor([0.5, 0.5, 0.5, 0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    for temperatures in (torch.ones(6), torch.zeros(6)):
        check(logits, temperatures, noise)
        tokens = sampling_triton.choose_tokens(logits, temperatures, noise)
        assert (tokens >= NO_TOKEN).tolist() == [True] * 3 + [False] * 3


def test_one_nan_anywhere_marks_its_row_alone() -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3))
    for row, column in enumerate((0, 3, 7, 4095, 4096, 4100, VOCAB - 1)):
        logits[row, column] = float("nan")
    noise = torch.full((9,), 0.5, dtype=torch.float64)
    for temperature in (0.0, 0.7):
        tokens = sampling_triton.choose_tokens(logits, torch.full((9,), temperature), noise)
        assert (tokens >= NO_TOKEN).tolist() == [True] * 7 + [False] * 2


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCAB, generator=generator)
    noise = torch.rand(3, generator=generator, dtype=torch.float64)
    together = sampling_triton.choose_tokens(logits, torch.ones(3), noise)
    alone = sampling_triton.choose_tokens(logits[1:2], torch.ones(1), noise[1:2])
    assert together[1] == alone[0]


@pytest.mark.parametrize("num_words", [(VOCAB + 31) // 32, 130, 128, 3, 160])
def test_masked_rows_equal_the_reference(num_words: int) -> None:
    """Masks as wide as the vocabulary, narrower and wider, in any order of rows."""
    generator = torch.Generator().manual_seed(num_words)
    logits = torch.randn(7, VOCAB, generator=generator) * 3
    logits[2, 40:50] = float("nan")
    temperatures = torch.tensor([0.0, 0.7, 1.0, 0.0, 1.5, 3.0, 1.0])
    noise = torch.rand(7, generator=generator, dtype=torch.float64)
    rows = [6, 0, 3, 5, 2, 1]
    masks = torch.randint(-(2**31), 2**31, (6, num_words), generator=generator, dtype=torch.int32)
    # Few tokens, one token, and tokens of the last word alone.
    masks[1] &= torch.randint(0, 2, (num_words,), generator=generator, dtype=torch.int32) << 31
    masks[2] = 0
    masks[2, min(num_words, VOCAB // 32) - 1] = -(2**31)
    masks[3, :-1] = 0
    masks[3, -1] = 1
    masked = MaskedRows(torch.tensor(rows, dtype=torch.int32), masks)
    expected = sampling_torch.choose_masked_tokens(logits, temperatures, noise, masked)
    actual = sampling_triton.choose_masked_tokens(logits, temperatures, noise, masked)
    assert actual.tolist() == expected.tolist()
    assert actual[2] == 32 * min(num_words, VOCAB // 32) - 1
