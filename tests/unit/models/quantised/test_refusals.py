"""Quantised checkpoints that are damaged or of unknown formats are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.errors import UnsupportedModel
from loramux.models.loader import load_model
from loramux.models.quantised.config import parse_quantisation
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.quantised_factory import (
    AWQ,
    BNB4,
    CASES,
    GPTQ,
    Tensors,
    args,
    compressed,
    configure,
    hqq_settings,
    quantise_folder,
)

MODULE = "model.layers.0.mlp.down_proj."
Change = Callable[[Tensors], object]


def drop(part: str) -> Change:
    return lambda tensors: tensors.pop(MODULE + part)


def put(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[MODULE + part] = make(tensors[MODULE + part]).contiguous()

    return change


def add(part: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({MODULE + part: tensor})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = float("nan")
    return changed


def keep(tensors: Tensors) -> None:
    del tensors


def other_state(tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(b'{"shape": [64, 96]}'), dtype=torch.uint8)


# Format, change of the tensors, change of the settings, reason.
BROKEN: dict[str, tuple[str, Change, dict[str, Any], str]] = {
    "AWQ with another group size": (
        "awq", keep, {"group_size": 16}, r"qzeros has shape \[3, 8\].*AWQ int4.*\[6, 8\]"),
    "AWQ with a group size that does not divide": (
        "awq", keep, {"group_size": 60}, "which groups of 60 .* do not divide"),
    "AWQ without zeros": ("awq", drop("qzeros"), {}, "lack .*down_proj.qzeros, which AWQ int4"),
    "AWQ with a truncated pack": (
        "awq", put("qweight", lambda t: t[:-32]), {}, r"qzeros has shape \[3, 8\].*\[2, 8\]"),
    "AWQ packed along the other dimension": (
        "awq", put("qweight", lambda t: t.t()), {}, "which groups of 32 .* do not divide"),
    "AWQ with a scale of NaN": (
        "awq", put("scales", with_nan), {}, "down_proj has NaN or infinite elements"),
    "AWQ with an infinite scale": (
        "awq", put("scales", lambda t: t * 1e30), {}, "NaN or infinite elements"),
    "AWQ named as GPTQ": (
        "awq", keep, {**GPTQ}, r"GPTQ int4|shape"),
    "GPTQ without scales": ("gptq", drop("scales"), {}, "lack .*scales, which GPTQ int4 needs"),
    "GPTQ with other bits": ("gptq", keep, {"bits": 8}, r"48 inputs, which groups of 32 .* do not"),
    "GPTQ with act-order and no g_idx": (
        "gptq", drop("g_idx"), {"desc_act": True}, "lack .*g_idx, which GPTQ int4 needs"),
    "GPTQ with groups that do not exist": (
        "gptq", put("g_idx", lambda t: t + 1), {}, "names groups from 1 to 3; there are 3"),
    "GPTQ with an ambiguous zero point": (
        "gptq", put("qzeros", lambda t: t * 0 - 1), {}, "zero point of 0 in version 1.*gptq_v2"),
    "packed without its shape": (
        "packed", drop("weight_shape"), {}, "lack .*weight_shape, which int4 needs"),
    "packed with another shape": (
        "packed", put("weight_shape", lambda t: t + 8), {},
        r"weight_packed has shape \[64, 12\].*\[72, 13\]"),
    "packed and FP8 in one module": (
        "packed", add("weight", torch.zeros(64, 96).to(torch.float8_e4m3fn)), {},
        "has weight, which is not part of int4: the file mixes methods"),
    "packed asymmetric without zero points": (
        "packed_asymmetric", drop("weight_zero_point"), {}, "lack .*weight_zero_point"),
    "FP8 without a scale": ("fp8_block", drop("weight_scale_inv"), {}, "lack .*weight_scale"),
    "FP8 with two scales": (
        "fp8_block", add("weight_scale", torch.ones(())), {}, "has the two scales"),
    "FP8 with other blocks": (
        "fp8_block", keep, {"weight_block_size": [128, 128]},
        r"weight_scale_inv has shape \[3, 3\] .*128 x 128.* \[1, 1\]"),
    "FP8 codes of NaN": (
        "fp8_block", put("weight", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype)), {},
        "NaN or infinite elements"),
    "FP8 codes stored as int8": (
        "fp8_static", put("weight", lambda t: t.view(torch.int8)), {},
        "weight is stored as torch.int8, and FP8 has float8_e4m3fn"),
    "int8 with scales of another length": (
        "ct_int8", put("weight_scale", lambda t: t[:-1]), {},
        r"weight_scale has shape \[63, 1\]; a number or one per row \(64\)"),
    "NVFP4 without the scale of the tensor": (
        "nvfp4", drop("weight_global_scale"), {}, "lack .*weight_global_scale, which NVFP4 needs"),
    "MXFP4 with a scale of NaN": (
        "mxfp4", put("weight_scale", lambda t: t * 0 + 255), {}, "NaN or infinite elements"),
    "nf4 truncated": (
        "nf4", put("weight", lambda t: t[:-1]), {}, "weight has 3071 bytes for 6144 codes"),
    "nf4 without its state": (
        "nf4", drop("weight.quant_state.bitsandbytes__nf4"), {}, "lack .*quant_state"),
    "nf4 with another state": (
        "nf4", put("weight.quant_state.bitsandbytes__nf4", other_state), {},
        "is not the state of a quantised weight"),
    "HQQ with other bits": ("hqq", keep, hqq_settings(3, 1), "nbits is .* where config.json has 3"),
    "a module that the settings leave dense": (
        "gptq", keep, {"dynamic": {"-:.*down_proj": {}}},
        "stored in g_idx, .*config.json does not say how it is quantised"),
    "another shape than the model's": (
        "packed", lambda t: t.update({
            MODULE + "weight_shape": torch.tensor([64, 64]),
            MODULE + "weight_packed": t[MODULE + "weight_packed"][:, :8].contiguous(),
            MODULE + "weight_scale": t[MODULE + "weight_scale"][:, :2].contiguous(),
        }), {}, r"down_proj.weight has shape \[64, 64\] where config.json asks for \[64, 96\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    kind, change, settings, reason = BROKEN[name]
    folder = save_hf_folder(tiny_transformers_model("llama", num_hidden_layers=1), tmp_path)
    quantise_folder(folder, CASES[kind])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    configure(folder, quantization_config=CASES[kind].settings | settings)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(folder, dtype=torch.float32)


PACKED = args(4, "int", "group", group_size=32)
UNSUPPORTED: dict[str, tuple[object, str]] = {
    "unknown": ({"quant_method": "aqlm"}, "quantised as aqlm, which is not supported. Use the unq"),
    "torchao": ({"quant_method": "torchao"}, "quantised as torchao"),
    "Quark": ({"quant_method": "quark"}, "quantised as quark"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "not an object": ([4], "is not an object"),
    "AWQ gemv": (AWQ | {"version": "gemv"}, "version 'gemv'.*version gemm"),
    "AWQ of 8 bits": (AWQ | {"bits": 8}, "AWQ with bits 8"),
    "AWQ without bits": ({"quant_method": "awq", "group_size": 128}, "bits is missing"),
    "GPTQ marlin": (GPTQ | {"checkpoint_format": "marlin"}, "layout 'marlin'"),
    "GPTQ of 5 bits": (GPTQ | {"bits": 5}, "GPTQ with bits 5"),
    "GPTQ with a bad pattern": (GPTQ | {"dynamic": {"-:(": {}}}, r"pattern '\('"),
    "AutoRound": ({"quant_method": "auto-round", "packing_format": "auto_round:x"}, "AutoRound"),
    "sparse": (
        compressed("pack-quantized", PACKED) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse-24-bitmask",
    ),
    "rotated": (
        compressed("pack-quantized", PACKED) | {"transform_config": {"config_groups": {"u": {}}}},
        "rotated weights",
    ),
    "MXFP6": (
        compressed("mxfp6-pack-quantized", args(6, "float", "group", group_size=32)),
        "float6 in the format 'mxfp6-pack-quantized'",
    ),
    "4-bit inputs": (
        compressed("pack-quantized", PACKED, args(4, "int", "token")),
        "weights with int4 inputs",
    ),
    "group without a size": (
        compressed("pack-quantized", args(4, "int", "group")),
        "strategy group without group_size",
    ),
    "ModelOpt AWQ": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ of Model"),
    "bitsandbytes without bits": ({"quant_method": "bitsandbytes"}, "neither load_in_4bit"),
    "bitsandbytes of another type": (BNB4 | {"bnb_4bit_quant_type": "af4"}, "type 'af4'"),
    "HQQ with quantised scales": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}, "scale_quant_params": {
            "nbits": 8}}},
        "quantised scales",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_format_is_refused_from_its_settings_alone(name: str) -> None:
    settings, reason = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModel, match=reason):
        parse_quantisation(settings)


def test_rules_decide_per_module() -> None:
    """Names, regular expressions and classes of compressed-tensors; wildcards of ModelOpt."""
    settings = compressed("pack-quantized", PACKED) | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    group = {"targets": ["re:.*down_proj"], "weights": PACKED | {"num_bits": 8}}
    settings["config_groups"] |= {"group_1": group}
    parsed = parse_quantisation(settings)
    labels = {
        name: None if found is None else found.label
        for name in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
        for found in [parsed.format_of(name)]
    }
    assert list(labels.values()) == [None, None, "int8"]
    up = parsed.format_of("model.language_model.layers.0.mlp.up_proj")
    assert up is not None
    assert up.label == "int4"
    assert parsed.label == "int4 and int8"
    excluded = ["lm_head", "model.layers.3.*"]
    parsed = parse_quantisation(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": excluded}
    )
    assert parsed.format_of("model.layers.3.mlp.up_proj") is None
    assert parsed.format_of("model.layers.31.mlp.up_proj") is not None
    assert parsed.format_of("lm_head") is None
