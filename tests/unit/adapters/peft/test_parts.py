"""Parts beside low rank compute what PEFT computes: equal logits of the merged base."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loramux.adapters.peft.inspection import InspectedAdapter, Inspector
from loramux.adapters.peft.parts import AdapterParts, BaseWeights
from loramux.adapters.peft.reader import make_parts
from tests.effective_model import TransformersBase, effective_model, transformers_base
from tests.model_factory import tiny_transformers_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
EMBEDDINGS = {"save_embedding_layers": True}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


@dataclass(frozen=True)
class Case:
    family: str
    lora: dict[str, Any]
    resize: int = 0
    save: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "dora": Case("llama", {"use_dora": True, "target_modules": LINEARS}),
    "dora_rslora_patterns": Case(
        "llama",
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    ),
    "dora_over_biases": Case("qwen2", {"use_dora": True, "target_modules": LINEARS}),
    "dora_in_some_layers": Case("qwen2", {"use_dora": True, "layers_to_transform": [1]}),
    "dora_and_trained_biases": Case("qwen2", {"use_dora": True, "bias": "all"}),
    "dora_of_vocabulary": Case(
        "qwen2", {"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    ),
    "dora_of_scaled_embedding": Case(
        "gemma3", {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}
    ),
    "lora_biases": Case("qwen2", {"bias": "lora_only"}),
    "all_biases": Case("qwen2", {"bias": "all", "target_modules": ["o_proj"]}),
    "all_biases_of_mlp": Case("llama31", {"bias": "all"}),
    "bias_of_b": Case("qwen2", {"lora_bias": True, "target_modules": LINEARS}),
    "bias_of_b_without_base_bias": Case("llama", {"lora_bias": True, "bias": "all"}),
    "bias_of_b_in_head": Case("llama", {"lora_bias": True, "target_modules": ["lm_head"]}),
    "saved_projections": Case("qwen2", {"modules_to_save": ["k_proj", "down_proj"]}),
    "saved_projections_with_biases": Case("qwen2", {"modules_to_save": ["k_proj"], "bias": "all"}),
    "saved_mlp_takes_no_lora": Case(
        "llama", {"modules_to_save": ["mlp"], "target_modules": LINEARS}
    ),
    "saved_norms": Case(
        "llama", {"modules_to_save": ["input_layernorm", "post_attention_layernorm", "model.norm"]}
    ),
    "saved_norms_of_gemma": Case(
        "gemma3",
        {"modules_to_save": ["input_layernorm", "pre_feedforward_layernorm", "model.norm"]},
    ),
    "saved_head": Case("llama", {"modules_to_save": ["lm_head"]}),
    "saved_head_of_tied": Case("qwen3", {"modules_to_save": ["lm_head"]}),
    "saved_head_of_tied_with_embedding": Case(
        "qwen3", {"modules_to_save": ["lm_head"]}, save=EMBEDDINGS
    ),
    "saved_embedding_of_tied": Case("qwen3", {"modules_to_save": ["embed_tokens"]}),
    "saved_embedding_of_tied_with_head": Case(
        "qwen3", {"modules_to_save": ["embed_tokens"]}, save=EMBEDDINGS
    ),
    "saved_both": Case("gemma3", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_tied_together": Case(
        "qwen3", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
    "resized": Case("llama", {}, resize=261, save=EMBEDDINGS),
    "resized_smaller": Case("llama", {}, resize=250, save=EMBEDDINGS),
    "resized_tied": Case("qwen3", {}, resize=261, save=EMBEDDINGS),
    "resized_saved": Case(
        "llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, resize=261, save=EMBEDDINGS
    ),
    "resized_tied_saved_embedding": Case(
        "qwen3", {"modules_to_save": ["embed_tokens"]}, resize=261, save=EMBEDDINGS
    ),
    "resized_lora": Case(
        "llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, resize=261
    ),
    "resized_dora": Case(
        "llama",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
        resize=261,
    ),
    "resized_tied_tokens": Case(
        "qwen3", {"trainable_token_indices": [259, 3]}, resize=261, save=EMBEDDINGS
    ),
    "embedding": Case("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding_alone": Case(
        "llama", {"target_modules": ["embed_tokens"]}, save={"save_embedding_layers": False}
    ),
    "embedding_of_tied": Case("qwen3", {"target_modules": ["embed_tokens"]}),
    "scaled_embedding": Case("gemma3", {"target_modules": "model.embed_tokens|.*q_proj"}),
    "embedding_and_tied_head": Case(
        "qwen3", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    ),
    "head": Case("llama", {"target_modules": ["lm_head", "q_proj"], "use_rslora": True}),
    "head_of_tied": Case("gemma3", {"target_modules": ["lm_head"]}),
    "tokens": Case("llama", {"trainable_token_indices": [7, 3, 40]}),
    "tokens_of_tied": Case("qwen3", {"trainable_token_indices": [7, 3, 40]}),
    "tokens_of_tied_with_weights": Case(
        "qwen3", {"trainable_token_indices": [7, 3, 40]}, save=EMBEDDINGS
    ),
    "tokens_of_tied_scaled": Case("gemma3", {"trainable_token_indices": {"embed_tokens": [7, 3]}}),
    "tokens_of_head": Case("qwen3", {"trainable_token_indices": {"lm_head": [7, 3]}}),
    "tokens_of_both": Case(
        "qwen3", {"trainable_token_indices": {"lm_head": [7, 3], "model.embed_tokens": [3, 9]}}
    ),
    "equal_tokens_of_both": Case(
        "qwen3", {"trainable_token_indices": {"lm_head": [7, 3], "embed_tokens": [7, 3]}}
    ),
}


@cache
def base_of(family: str) -> TransformersBase:
    return transformers_base(tiny_transformers_model(family))


def train(folder: Path, case: Case, seed: int = 0) -> Any:
    """Lets PEFT save an adapter with random values; returns the model that PEFT loads from it."""
    model = copy.deepcopy(base_of(case.family).model)
    if case.resize:
        model.resize_token_embeddings(case.resize, mean_resizing=False)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        | case.lora
    )
    resized = copy.deepcopy(model)
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in {id(p): p for p in peft_model.parameters() if p.requires_grad}.values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.1 * noise
    peft_model.save_pretrained(folder, **case.save)
    return PeftModel.from_pretrained(resized, folder).eval()


def read(
    folder: Path, base: TransformersBase, weights: BaseWeights | None
) -> tuple[InspectedAdapter, AdapterParts]:
    with Inspector(base.info).open(folder) as (found, file):
        loaded = file.load()
    return found, make_parts(found, loaded.tensors, weights)


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    base = base_of(CASES[name].family)
    oracle = train(tmp_path, CASES[name])
    found, parts = read(tmp_path, base, base)
    assert {spec.key: (spec.num_rows, spec.width) for spec in found.extras} == {
        extra.key: tuple(extra.values.shape) for extra in parts.extras
    }
    ours = effective_model(base, parts, found.extras)
    tokens = torch.arange(CASES[name].resize or 256)[None]
    with torch.no_grad():
        expected, actual = oracle(tokens).logits, ours(tokens).logits
        unchanged = base.model(tokens.clamp_max(249)).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    width = min(actual.shape[-1], unchanged.shape[-1])
    assert (actual[..., :width] - unchanged[..., :width]).abs().max() > 1e-2
