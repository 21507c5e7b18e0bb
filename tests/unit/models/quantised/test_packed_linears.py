"""Linears that keep the codes of a checkpoint have the weights of its dequantiser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import DENSE
from loramux.kernels.reference import quantised as reference
from loramux.models import linear_method
from loramux.models.decoder import Decoder
from loramux.models.loader import load_model
from tests.model_factory import tiny_transformers_model
from tests.quantised_factory import CASES, quantised_model

PACKED = {
    "awq": "int4 in groups of 32",
    "gptq": "int4 in groups of 32",
    "gptq_v2": "int4 in groups of 32",
    "packed": "int4 in groups of 32",
    "packed_asymmetric": "int4 in groups of 32",
    "ct_fp8_channel": "FP8",
    "ct_fp8_tensor": "FP8 weights",
}
DEQUANTISED = ["gptq_act_order", "packed_act_order", "gptq_8_bits", "fp8_block", "nf4", "ct_int8"]


def loaded(folder: Path) -> Decoder:
    return load_model(folder, dtype=torch.float32).decoder


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU have the kernels of a Hopper GPU, in torch."""
    monkeypatch.setattr(linear_method, "select_quantised_gemm", lambda device, dtype: reference)


@pytest.mark.parametrize("name", PACKED)
def test_codes_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_transformers_model("llama31")
    folder = quantised_model(model, tmp_path / "base", CASES[name])
    dense = loaded(folder)
    monkeypatch.setattr(linear_method, "select_quantised_gemm", lambda device, dtype: reference)
    packed = loaded(folder)
    for (spec, kept), (_, expected) in zip(packed.linears(), dense.linears(), strict=True):
        if kept.gemm_key == DENSE:
            assert spec.in_features % 64, "a pair of groups of 32 fits"
            continue
        assert kept.gemm_key == PACKED[name]
        assert kept.num_bytes < expected.num_bytes / 3
        # Scales of int4 are rounded to float16.
        torch.testing.assert_close(
            kept.dequantised_rows(), expected.dequantised_rows(), atol=0, rtol=1e-3
        )


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("name", DEQUANTISED)
def test_formats_without_kernels_are_dequantised(name: str, tmp_path: Path) -> None:
    model = tiny_transformers_model("llama31")
    decoder = loaded(quantised_model(model, tmp_path / "base", CASES[name]))
    assert {linear.gemm_key for _, linear in decoder.linears()} == {DENSE}


@pytest.mark.usefixtures("with_kernels")
def test_codes_of_nan_are_refused(tmp_path: Path) -> None:
    folder = quantised_model(
        tiny_transformers_model("llama31"), tmp_path / "base", CASES["ct_fp8_channel"]
    )
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = tensors[name].view(torch.uint8)
    codes[3, 5] = 0x7F
    tensors[name] = codes.view(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match="layers.1.mlp.down_proj has NaN"):
        loaded(folder)
