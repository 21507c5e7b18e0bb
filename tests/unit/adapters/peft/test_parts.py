"""Extras compute what PEFT computes: equal logits of the merged base."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from loramux.adapters.peft.inspection import InspectedAdapter, Inspector
from loramux.adapters.peft.parts import AdapterParts, BaseWeights
from loramux.adapters.peft.reader import make_parts
from loramux.errors import AdapterRefused
from tests.effective_model import TransformersBase, effective_model, transformers_base
from tests.model_factory import tiny_transformers_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"
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


# One of each code path; the others run with the slow tests.
FAST = (
    "dora_over_biases",
    "dora_of_vocabulary",
    "dora_and_trained_biases",
    "bias_of_b",
    "saved_projections_with_biases",
    "saved_norms_of_gemma",
    "saved_embedding_of_tied_with_head",
    "resized_tied",
    "resized_lora",
    "scaled_embedding",
    "embedding_and_tied_head",
    "tokens_of_tied_with_weights",
    "tokens_of_both",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]
)
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


@cache
def trained(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="loramux-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(folder, CASES[name])
    return folder


def change(source: Path, folder: Path, name: str, edit: Any) -> Path:
    """Copy an adapter with one tensor edited in place."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / WEIGHTS)
    edit(tensors[name])
    save_file(tensors, folder / WEIGHTS)
    return folder


def refusal_of(folder: Path, base: TransformersBase) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as refused:
        read(folder, base, base)
    return refused.value


def test_parts_that_need_the_base_are_absent_without_it() -> None:
    base = base_of("qwen2")
    found, parts = read(trained("dora_and_trained_biases"), base, None)
    assert not found.contents.are_views and found.extras and parts.extras == ()
    found, parts = read(trained("bias_of_b"), base, None)
    assert {part.key for part in parts.extras} == {spec.key for spec in found.extras}


def test_whole_weights_are_views_of_the_file() -> None:
    found, parts = read(trained("saved_head"), base_of("llama"), None)
    assert found.contents.are_views
    assert [tuple(part.values.shape) for part in parts.extras] == [(256, 64)]


def test_what_replaces_weights_is_used_alone_and_its_size_told() -> None:
    base = base_of("qwen2")
    found, _ = read(trained("saved_projections"), base, base)
    assert found.only_alone == "it replaces down_proj in 3 layers, k_proj in 3 layers"
    (warning,) = (warning for warning in found.warnings if "replaces" in warning)
    assert (
        "k_proj in 3 layers" in warning and "MiB" in warning and "an adapter of rank 8" in warning
    )
    found, _ = read(trained("dora_over_biases"), base, base)
    assert found.only_alone == "" and not any("replaces" in text for text in found.warnings)
    found, _ = read(trained("tokens_of_both"), base_of("qwen3"), None)
    assert found.only_alone == "it replaces tokens of embed_tokens, tokens of lm_head"


def test_an_adapter_may_have_no_low_rank_of_projections() -> None:
    found, parts = read(trained("embedding_of_tied"), base_of("qwen3"), None)
    assert found.ranks == {} and parts.modules == ()
    assert {(spec.module, spec.kind) for spec in found.extras} == {
        ("embed_tokens", "low_rank_a"),
        ("embed_tokens", "low_rank_b"),
    }


def test_the_rank_cap_counts_for_the_embedding() -> None:
    with pytest.raises(AdapterRefused, match="embed_tokens has rank 4") as refused:
        Inspector(base_of("qwen3").info, max_rank=3).inspect(trained("embedding_of_tied"))
    assert refused.value.code == "rank_over_cap"


def test_a_copy_of_another_base_is_refused(tmp_path: Path) -> None:
    """PEFT saves the embedding below its LoRA, which must be that of this base."""
    name = f"{EMBED}.base_layer.weight"
    folder = change(trained("embedding_of_tied"), tmp_path, name, lambda t: t[3, 4].add_(0.1))
    assert refusal_of(folder, base_of("qwen3")).code == "full_weights"


def test_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    base = base_of("qwen3")
    name = f"{HEAD}.weight"
    folder = change(trained("resized_tied"), tmp_path / "w", name, lambda t: t[3, 4].add_(0.1))
    assert refusal_of(folder, base).code == "full_weights"
    name, source = f"{HEAD}.lora_B.weight", trained("embedding_and_tied_head")
    folder = change(source, tmp_path / "l", name, lambda t: t[3, 2].add_(0.1))
    assert refusal_of(folder, base).code == "bad_value"


def test_a_norm_that_is_zero_in_the_base_has_no_gain(tmp_path: Path) -> None:
    folder = trained("saved_norms_of_gemma")
    base = transformers_base(copy.deepcopy(base_of("gemma3").model))
    with torch.no_grad():
        base.model.model.layers[1].input_layernorm.weight[5] = -1.0
    refusal = refusal_of(folder, base)
    assert refusal.code == "unsupported_target" and "layers.1.input_layernorm" in refusal.reason
    name = "base_model.model.model.layers.1.input_layernorm.weight"
    # Zero in both is exact.
    found, parts = read(change(folder, tmp_path, name, lambda t: t[5].fill_(-1.0)), base, base)
    assert len(parts.extras) == len(found.extras)


def test_a_magnitude_of_a_zero_row_is_refused(tmp_path: Path) -> None:
    base = transformers_base(copy.deepcopy(base_of("qwen2").model))
    with torch.no_grad():
        base.linear(0, "q_proj").weight[7] = 0
    name = f"{Q0}.lora_B.weight"
    folder = change(trained("dora_over_biases"), tmp_path, name, lambda t: t[7].zero_())
    refusal = refusal_of(folder, base)
    assert refusal.code == "not_finite" and "layers.0.self_attn.q_proj" in refusal.reason
