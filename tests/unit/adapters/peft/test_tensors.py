"""Names and shapes of tensors; broken_adapters has the refusals."""

from __future__ import annotations

import pytest
import torch

from loramux.adapters.peft.config import parse_config
from loramux.adapters.peft.matching import MatchedTensors, plan_lora
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.errors import AdapterRefused
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
)

CONFIG = tiny_llama_config()
BASE = tiny_base_info(CONFIG)


def match(tensors: dict[str, torch.Tensor], max_rank: int | None = None) -> MatchedTensors:
    entries = [
        TensorEntry(name, "F32", tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    return plan_lora(parse_config(lora_config_dict()), BASE).match(entries, max_rank=max_rank)


def refusal_of(tensors: dict[str, torch.Tensor]) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as refused:
        match(tensors)
    return refused.value


def test_pairs_follow_the_plans() -> None:
    matched = match(lora_tensors(CONFIG))
    for plan, pair in zip(matched.plans, matched.pairs, strict=True):
        assert pair.a.name == f"base_model.model.{plan.target.path}.lora_A.weight"
        assert pair.b.name == f"base_model.model.{plan.target.path}.lora_B.weight"
    assert matched.unused == ()


def test_names_may_hold_the_default_adapter_name() -> None:
    tensors = {
        name.replace(".weight", ".default.weight"): tensor
        for name, tensor in lora_tensors(CONFIG).items()
    }
    assert len(match(tensors).pairs) == 6


def test_names_of_another_adapter_are_unknown() -> None:
    tensors = {
        name.replace(".weight", ".mine.weight"): tensor
        for name, tensor in lora_tensors(CONFIG).items()
    }
    assert refusal_of(tensors).code == "unknown_tensors"


def test_what_only_training_reads_is_listed_as_unused() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_velora_embed"
    matched = match({**lora_tensors(CONFIG), name: torch.ones(2)})
    assert matched.unused == (name,)


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "down_proj"])
def test_a_wrong_shape_tells_the_hidden_size_that_the_adapter_is_for(name: str) -> None:
    tensors = lora_tensors(tiny_llama_config(hidden_size=64), names=(name,))
    refusal = refusal_of(tensors)
    assert refusal.code == "wrong_shape"
    assert "hidden size 64" in refusal.reason


def test_shapes_are_judged_before_the_number_of_layers() -> None:
    bigger = tiny_llama_config(hidden_size=64, num_hidden_layers=9)
    assert refusal_of(lora_tensors(bigger)).code == "wrong_shape"


def test_a_layer_too_many_is_told_by_number() -> None:
    refusal = refusal_of(lora_tensors(tiny_llama_config(num_hidden_layers=5)))
    assert "layer 4" in refusal.reason and "0 to 2" in refusal.reason


def test_a_rank_at_the_cap_passes() -> None:
    assert match(lora_tensors(CONFIG), max_rank=4).pairs
    with pytest.raises(AdapterRefused, match="at most 3"):
        match(lora_tensors(CONFIG), max_rank=3)
