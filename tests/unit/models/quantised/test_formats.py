"""Dequantisers against the weights that the writers packed, and against the libraries' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.models.loader import load_model
from loramux.models.quantised.checkpoint import dequantised_weights
from loramux.models.quantised.config import parse_quantisation
from tests.model_factory import save_hf_folder, tiny_transformers_model
from tests.quantised_factory import CASES, configure, quantise_folder

GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")


def weights(file: Path, settings: object) -> dict[str, torch.Tensor]:
    found = dequantised_weights([file], parse_quantisation(settings), CPU)
    return {name: read() for name, read in found}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_codes_stand_for(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(96, 64, generator=generator) * torch.rand(64, generator=generator).exp()
    parts, expected = CASES[name].quantise(weight)
    file = tmp_path / "model.safetensors"
    save_file({f"m.{part}": one.contiguous() for part, one in parts.items()}, file)
    (found,) = weights(file, CASES[name].settings).values()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0, rtol=2e-7)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.safetensors")), ids=lambda f: f.stem)
def test_weights_are_bit_for_bit_those_of_the_library(file: Path, tmp_path: Path) -> None:
    """The files come from make_golden.py, which names the library and version of each."""
    stored = load_file(file)
    settings = json.loads((GOLDEN / "settings.json").read_text())[file.stem]
    expected = stored.pop("expected")
    save_file(stored, tmp_path / "model.safetensors")
    found = weights(tmp_path / "model.safetensors", settings["quantization_config"])
    assert torch.equal(found["m.weight"], expected)


def test_the_experts_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 8, 2), generator=generator, dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    save_file({"mlp.experts.up_blocks": blocks, "mlp.experts.up_scales": scales}, file)
    found = weights(file, {"quant_method": "mxfp4"})["mlp.experts.up"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found, expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf_folder(tiny_transformers_model("llama31"), tmp_path / "tiny")


def test_tensors_of_a_module_may_lie_in_different_shards(folder: Path) -> None:
    quantise_folder(folder, CASES["awq"])
    whole = load_model(folder, dtype=torch.float32).decoder.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name.rpartition(".")[2])
    index = {}
    for shard in range(3):
        file = f"model-{shard}.safetensors"
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = load_model(folder, dtype=torch.float32).decoder.state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_dense_layers_and_unused_scales_load(folder: Path) -> None:
    """Tools leave layers dense and store scales of activations and of the KV cache."""
    case = CASES["modelopt_fp8"]
    dense = quantise_folder(folder, case, wanted=lambda n: n.endswith("proj.weight") and ".1." in n)
    file = folder / "model.safetensors"
    prefix = "model.layers.1.self_attn."
    unused = ("q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale", "attn.k_scale")
    save_file(load_file(file) | {prefix + one: torch.tensor(0.5) for one in unused}, file)
    layers = load_model(folder, dtype=torch.float32).decoder.layers
    assert torch.equal(layers[1].down.weight, dense["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(layers[0].down.weight, dense["model.layers.0.mlp.down_proj.weight"])


def test_a_quantised_head_loads(folder: Path) -> None:
    dense = quantise_folder(folder, CASES["gptq"], wanted=lambda name: name == "lm_head.weight")
    head = load_model(folder, dtype=torch.float32).decoder.lm_head
    assert torch.equal(head.weight, dense["lm_head.weight"])


def test_layers_may_have_settings_of_their_own(folder: Path) -> None:
    """GPTQModel's `dynamic`: one module with 8 bits, one dense."""
    settings = CASES["gptq"].settings | {
        "dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*o_proj": {}}
    }
    first = quantise_folder(folder, CASES["gptq_8_bits"], wanted=lambda n: "down_proj.w" in n)
    configure(folder, quantization_config=None)
    others = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj")
    second = quantise_folder(
        folder, CASES["gptq"], wanted=lambda n: any(f"{one}.w" in n for one in others)
    )
    configure(folder, quantization_config=settings)
    layer = load_model(folder, dtype=torch.float32).decoder.layers[0]
    assert torch.equal(layer.down.weight, first["model.layers.0.mlp.down_proj.weight"])
    v = second["model.layers.0.self_attn.v_proj.weight"]
    assert torch.equal(layer.qkv.weight[-len(v) :], v)


def test_settings_may_lie_beside_the_config(folder: Path) -> None:
    """ModelOpt's hf_quant_config.json; the digest tells when they change."""
    quantise_folder(folder, CASES["modelopt_fp8"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    side = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.experts.*"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))
    model = load_model(folder, dtype=torch.float32)
    assert model.config.quantisation is not None
    assert model.config.quantisation.label == "FP8"
    side["producer"] = {"name": "modelopt"}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))
    assert load_model(folder, dtype=torch.float32).digest != model.digest
