"""Each family against transformers, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.models.decoder import Decoder
from loramux.models.loader import load_model
from tests.model_factory import (
    FAMILIES,
    SLIDING_WINDOW,
    DenseAttention,
    save_hf_folder,
    tiny_transformers_model,
)

TOKENS = torch.randint(3, 256, (41,), generator=torch.Generator().manual_seed(5))
assert len(TOKENS) > 4 * SLIDING_WINDOW


def run_in_chunks(decoder: Decoder, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    attention = DenseAttention()
    rows, start = [], 0
    for length in lengths:
        positions = torch.arange(start, start + length)
        hidden = decoder(tokens[start : start + length], positions, attention)
        rows.append(decoder.logits(hidden))
        start += length
    assert start == len(tokens)
    return torch.cat(rows)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle_and_decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    model = tiny_transformers_model(request.param)
    folder = save_hf_folder(model, tmp_path_factory.mktemp(request.param))
    return model, load_model(folder, dtype=torch.float32).decoder


@pytest.mark.parametrize(
    "lengths", [[41], [16, 1, 20, 4], [1] * 41], ids=["whole", "chunks", "token by token"]
)
def test_logits_equal_transformers(
    oracle_and_decoder: tuple[Any, Decoder], lengths: list[int]
) -> None:
    model, decoder = oracle_and_decoder
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
        actual = run_in_chunks(decoder, TOKENS, lengths)
    assert actual.dtype == torch.float32
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
