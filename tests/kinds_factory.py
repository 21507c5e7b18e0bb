"""One adapter of every kind that PEFT saves and this server takes, written by PEFT itself."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
NUM_ADDED_TOKENS = 5


@dataclass(frozen=True)
class Kind:
    """A PEFT config, and how the base is changed before it is applied."""

    config: str
    """Name of a class of the peft package."""
    fields: dict[str, Any] = field(default_factory=dict)
    num_added_tokens: int = 0
    save: dict[str, Any] = field(default_factory=dict)
    """Arguments of save_pretrained."""


def lora(**fields: Any) -> Kind:
    return Kind("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **fields})


KINDS: dict[str, Kind] = {
    "lora": lora(),
    "rslora_patterns": lora(
        use_rslora=True, rank_pattern={"q_proj": 3}, alpha_pattern={"o_proj": 5}
    ),
    "dora": lora(use_dora=True, target_modules=ALL_LINEAR),
    "dora_rslora": lora(use_dora=True, use_rslora=True, r=9),
    "bias_lora_only": lora(bias="lora_only", target_modules=["q_proj", "v_proj", "down_proj"]),
    "bias_all": lora(bias="all", target_modules=["v_proj"]),
    "lora_bias": lora(lora_bias=True, target_modules=["q_proj", "up_proj"]),
    "saved_head": lora(modules_to_save=["lm_head"]),
    "saved_embedding": lora(modules_to_save=["embed_tokens"]),
    "saved_norms": lora(modules_to_save=["input_layernorm", "post_attention_layernorm", "norm"]),
    "saved_projection": lora(target_modules=["q_proj"], modules_to_save=["down_proj", "k_proj"]),
    "lora_head": lora(target_modules=["q_proj", "lm_head"]),
    "lora_embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "trained_tokens": lora(trainable_token_indices=[3, 17, 90]),
    "added_tokens": Kind(
        "LoraConfig",
        {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
        num_added_tokens=NUM_ADDED_TOKENS,
    ),
    "loha": Kind("LoHaConfig", {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]}),
    "lokr": Kind("LoKrConfig", {"r": 2, "alpha": 4, "target_modules": ["q_proj", "up_proj"]}),
    "ia3": Kind(
        "IA3Config",
        {
            "target_modules": ["k_proj", "v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
    ),
    "oft": Kind("OFTConfig", {"oft_block_size": 8, "target_modules": ["q_proj", "v_proj"]}),
    "vera": Kind("VeraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "norm_tuning": Kind(
        "LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}
    ),
}


# These train norms behind attention and MLP, which no part replaces.
REFUSED = {("gemma2", "saved_norms"), ("gemma2", "norm_tuning")}


def kinds_of(family: str) -> list[str]:
    """Return the kinds that are served on a model of tests.model_factory."""
    return [name for name in KINDS if (family, name) not in REFUSED]


def widened(model: Any, kind: Kind) -> Any:
    """Return a copy of the base, with added tokens if the kind has them."""
    changed = copy.deepcopy(model)
    changed.name_or_path = changed.name_or_path or "tiny-llama"
    if kind.num_added_tokens:
        torch.manual_seed(11)
        size = changed.config.vocab_size + kind.num_added_tokens
        changed.resize_token_embeddings(size, mean_resizing=False)
    return changed


def make_kind(name: str, model: Any, folder: Path, *, seed: int = 0) -> Path:
    """Lets PEFT write an adapter whose trained tensors are random; the model is not changed."""
    import peft

    kind = KINDS[name]
    config = getattr(peft, kind.config)(task_type="CAUSAL_LM", **kind.fields)
    with warnings.catch_warnings():
        # PEFT's advice on tied or resized embeddings; these tests are of what it saves then.
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(widened(model, kind), config)
        randomize(adapted, seed)
        adapted.save_pretrained(folder, **kind.save)
    return folder


def randomize(adapted: Any, seed: int) -> None:
    """Move every trained tensor from its initial value by a random amount."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * noise.to(parameter.dtype)


def load_kind(name: str, model: Any, folder: Path) -> Any:
    """Return PEFT's own model of a saved adapter."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(widened(model, KINDS[name]), folder).eval()


@torch.inference_mode()
def logits_of(model: Any, tokens: tuple[int, ...]) -> Tensor:
    """Return the logits [tokens, vocabulary] of a transformers or PEFT model."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@torch.inference_mode()
def greedy(model: Any, tokens: tuple[int, ...], count: int) -> list[int]:
    """Return the next `count` greedy tokens of a transformers or PEFT model."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(logits_of(model, (*tokens, *found))[-1].argmax()))
    return found
