from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.errors import UnsupportedModel
from loramux.models.folder import model_name
from loramux.models.loader import load_model
from tests.model_factory import save_hf_folder, tiny_transformers_model

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf_folder(tiny_transformers_model("llama"), tmp_path / "tiny")


def rewrite_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rewrite_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def load(path: Path) -> object:
    return load_model(path, dtype=torch.float32)


def test_projections_are_fused_in_checkpoint_order(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    layer = load_model(folder, dtype=torch.float32).decoder.layers[1]
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.qkv.weight, torch.cat(qkv))
    assert torch.equal(layer.gate_up.weight, torch.cat(gate_up))
    assert torch.equal(layer.o.weight, tensors[f"{prefix}self_attn.o_proj.weight"])
    assert torch.equal(layer.down.weight, tensors[f"{prefix}mlp.down_proj.weight"])


def test_shards_load_as_the_single_file_does(folder: Path, tmp_path: Path) -> None:
    model = tiny_transformers_model("llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole = load_model(folder, dtype=torch.float32).decoder.state_dict()
    sharded = load_model(tmp_path / "sharded", dtype=torch.float32).decoder.state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_weights_are_cast_to_the_dtype_asked_for(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.decoder.parameters()} == {torch.bfloat16}


def test_no_parameter_wants_a_gradient(folder: Path) -> None:
    decoder = load_model(folder, dtype=torch.float32).decoder
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_tied_head_shares_the_embedding_even_when_the_file_has_a_head(tmp_path: Path) -> None:
    folder = save_hf_folder(tiny_transformers_model("smollm2"), tmp_path)
    rewrite_weights(folder, lambda t: t.update({"lm_head.weight": torch.zeros(256, 48)}))
    decoder = load_model(folder, dtype=torch.float32).decoder
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert decoder.lm_head.weight.abs().sum() > 0


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_extra_tensor_is_named(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite_weights(folder, lambda t: t.update({name: torch.zeros(64)}))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM does not have.*q_proj.bias"):
        load(folder)


def test_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_weights(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


def test_shape_that_contradicts_the_config_is_named(folder: Path) -> None:
    rewrite_config(folder, vocab_size=300)
    with pytest.raises(UnsupportedModel, match=r"weight has shape \[256, 64\].*\[300, 64\]"):
        load(folder)


def test_pickle_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickle.*safetensors"):
        load(folder)


def test_damaged_file_is_refused_by_name(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match=f"{WEIGHTS} is not a valid safetensors file"):
        load(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="missing: model-00001-of-00001.safetensors"):
        load(folder)


def test_index_cannot_reach_out_of_its_folder(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="outside its folder"):
        load(folder)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no config.json"),
        ({"adapter_config.json": "{}"}, "LoRA adapter, not a base"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "not a JSON object"),
    ],
    ids=["empty", "adapter", "broken", "list"],
)
def test_folder_that_is_no_model_says_why(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


def test_folder_without_weights_says_so(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match="no safetensors weights"):
        load(folder)


def test_digest_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    first = load_model(folder, dtype=torch.float32).digest
    moved = folder.rename(tmp_path / "elsewhere")
    assert load_model(moved, dtype=torch.float32).digest == first
    rewrite_weights(moved, lambda t: t["model.norm.weight"].add_(1e-3))
    assert load_model(moved, dtype=torch.float32).digest != first


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_model(folder, dtype=torch.float32).eos_token_ids == (7, 2)
    (folder / "generation_config.json").unlink()
    rewrite_config(folder, eos_token_id=None)
    assert load_model(folder, dtype=torch.float32).eos_token_ids == ()


def test_progress_ends_at_one(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(folder, dtype=torch.float32, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("Loading weights", 1.0)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("tiny-llama-IQ2_XXS.gguf", "tiny-llama"),
        ("model-F16.gguf", "model"),
        ("Qwen2.5-7B.gguf", "Qwen2.5-7B"),
        ("some/folder", "folder"),
        ("hub/models--org--Name-1B/snapshots/0a1b", "org/Name-1B"),
    ],
)
def test_served_name(path: str, name: str) -> None:
    assert model_name(Path(path)) == name
