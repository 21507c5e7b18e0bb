from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lib.random_weights import SHAPES, llama_settings
from benchmarks.lib.roofline import H200_BYTES_PER_S, H200_FLOPS, measure_cpu, roofline_of
from loramux.models.architectures import parse_config
from loramux.models.decoder import Decoder
from loramux.models.loader import LoadedModel


def shapes_only(name: str) -> LoadedModel:
    config = parse_config(llama_settings(SHAPES[name]))
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    return LoadedModel(
        decoder=decoder,
        config=config,
        name=name,
        tokenizer_folder=Path(),
        eos_token_ids=(),
        digest="",
    )


def test_the_roofline_of_llama_8b_on_an_h200_is_the_published_one() -> None:
    limit = roofline_of(shapes_only("llama-3.1-8b"), bytes_per_s=H200_BYTES_PER_S, flops=H200_FLOPS)
    assert limit.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert limit.kv_bytes_per_token == 128 * 1024
    speeds = [limit.tokens_per_s(batch, 512) for batch in (1, 32, 128, 256)]
    assert speeds == pytest.approx([285, 8_000, 23_300, 28_900], rel=0.01)


def test_the_weights_of_a_step_are_those_of_the_decoder_but_the_embedding() -> None:
    model = shapes_only("smollm2-135m")
    matrices = sum(p.numel() for p in model.decoder.parameters() if p.dim() == 2)
    limit = roofline_of(model, bytes_per_s=1.0, flops=1.0)
    # The embedding is the head here, which every step reads.
    assert limit.num_weights == matrices


def test_a_cpu_is_measured() -> None:
    assert all(speed > 0 for speed in measure_cpu(torch.float32))
