"""Device sampling, in Triton's interpreter, against its torch twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels import sampling_torch, sampling_triton  # noqa: E402

VOCAB = sampling_triton.PART + 700
"""Two parts, the second not full."""


def check(logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor) -> None:
    expected = sampling_torch.choose_tokens(logits, temperatures, noise)
    actual = sampling_triton.choose_tokens(logits, temperatures, noise)
    assert actual.tolist() == expected.tolist()


def test_draws_equal_the_twins() -> None:
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


def test_odd_rows_equal_the_twins() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0] = float("nan")
    logits[1, 77] = float("inf")
    logits[2] = float("-inf")
    logits[3, : sampling_triton.PART + 5] = float("-inf")
    logits[4, 100:] = float("-inf")
    noise = torch.tensor([0.5, 0.5, 0.5, 0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    check(logits, torch.ones(6), noise)


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCAB, generator=generator)
    noise = torch.rand(3, generator=generator, dtype=torch.float64)
    together = sampling_triton.choose_tokens(logits, torch.ones(3), noise)
    alone = sampling_triton.choose_tokens(logits[1:2], torch.ones(1), noise[1:2])
    assert together[1] == alone[0]
