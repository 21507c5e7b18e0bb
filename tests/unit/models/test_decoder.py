"""Each model family against transformers, in one forward and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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


# torch says so once, on processors without bfloat16, and goes on with a slower product.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_error_is_within_twice_that_of_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = tiny_transformers_model(family)
    folder = save_hf_folder(model, tmp_path)
    decoder = load_model(folder, dtype=dtype).decoder
    with torch.inference_mode():
        exact = model(TOKENS[None]).logits[0]
        rounded = model.to(dtype)(TOKENS[None]).logits[0].float()
        actual = run_in_chunks(decoder, TOKENS, [41])
    assert actual.dtype == torch.float32
    # Over 24 seeds in bfloat16 the ratio was 0.71 to 1.45, its mean within 7 % of 1.
    assert (actual - exact).norm() < 2 * (rounded - exact).norm()


def test_a_replaced_linear_is_called(tmp_path: Path) -> None:
    """Adapters are attached by replacing the linears of a layer."""
    folder = save_hf_folder(tiny_transformers_model("llama"), tmp_path)
    decoder = load_model(folder, dtype=torch.float32).decoder
    calls: list[str] = []

    class Recorder(torch.nn.Module):
        def __init__(self, name: str, inner: torch.nn.Module) -> None:
            super().__init__()
            self.name, self.inner = name, inner

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.name)
            return self.inner(x)  # type: ignore[no-any-return]

    for layer in decoder.layers:
        for site in ("qkv", "o", "gate_up", "down"):
            setattr(layer, site, Recorder(site, getattr(layer, site)))
    with torch.inference_mode():
        decoder(TOKENS, torch.arange(len(TOKENS)), DenseAttention())
    assert calls == ["qkv", "o", "gate_up", "down"] * 2
