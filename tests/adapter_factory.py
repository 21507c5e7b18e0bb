"""LoRA adapters for tests: real ones that PEFT writes, and hand-made ones of any shape."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.types.model import BaseModelInfo
from tests.linear_specs import specs_of

BASE_NAME = "tiny-llama"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def tiny_llama_config(**overrides: Any) -> LlamaConfig:
    """Return a config in which all sizes differ, so that a mix-up cannot pass."""
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **overrides})


def tiny_llama(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def tiny_base_info(config: Any, name: str = BASE_NAME) -> BaseModelInfo:
    """Return the shapes of any transformers config with Llama's layers."""
    shapes = linear_shapes(config)
    return BaseModelInfo(
        name=name,
        architecture="LlamaForCausalLM",
        num_layers=config.num_hidden_layers,
        linears=specs_of(shapes),
        num_kv_heads=1,
        head_dim=shapes["k_proj"][1],
        vocab_size=512,
        num_parameters=1,
    )


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Return (in, out) of each projection."""
    hidden, middle = config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries = config.num_attention_heads * head_size
    keys = config.num_key_value_heads * head_size
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, middle),
        "up_proj": (hidden, middle),
        "down_proj": (middle, hidden),
    }


def make_peft_adapter(
    folder: Path,
    model_or_config: Any,
    *,
    seed: int = 0,
    r: int = 4,
    dtype: torch.dtype = torch.float32,
    **lora_config: Any,
) -> Path:
    """Lets PEFT write an adapter with a random B; the model is not changed."""
    from peft import LoraConfig, get_peft_model

    is_model = isinstance(model_or_config, torch.nn.Module)
    model = copy.deepcopy(model_or_config) if is_model else tiny_llama(model_or_config)
    # PEFT records the name of the model, and warns if the config has another one.
    model.name_or_path = model.name_or_path or BASE_NAME
    settings: dict[str, Any] = {
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name_or_path,
    }
    peft_model = get_peft_model(model, LoraConfig(**{**settings, "r": r, **lora_config}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = noise.to(dtype)
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def load_with_peft(folder: Path, model: torch.nn.Module) -> dict[str, Any]:
    """Return PEFT's layers by module path, the reference for read_adapter."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    peft_model = PeftModel.from_pretrained(copy.deepcopy(model), folder)
    return {
        name.removeprefix("base_model.model."): module
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }


def lora_config_dict(**overrides: Any) -> dict[str, Any]:
    """Return a config that fits the tensors of `lora_tensors`."""
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": BASE_NAME,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    return {**settings, **overrides}


def lora_tensors(
    config: Any, *, seed: int = 0, r: int = 4, names: tuple[str, ...] = ("q_proj", "v_proj")
) -> dict[str, torch.Tensor]:
    """Return the tensors of every layer under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for target in tiny_base_info(config).targets:
        if target.projection in names:
            prefix = f"base_model.model.{target.path}"
            a = torch.randn(r, target.in_features, generator=generator) * 0.3
            b = torch.randn(target.out_features, r, generator=generator) * 0.3
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    return tensors


def write_adapter(
    folder: Path,
    config: Mapping[str, Any] | str | None,
    tensors: Mapping[str, torch.Tensor] | bytes | None,
) -> Path:
    """Write a folder; strings and bytes are written unchanged, None omits the file."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config, indent=2)
        (folder / "adapter_config.json").write_text(text)
    weights = folder / "adapter_model.safetensors"
    if isinstance(tensors, bytes):
        weights.write_bytes(tensors)
    elif tensors is not None:
        save_file(dict(tensors), weights, metadata={"format": "pt"})
    return folder
