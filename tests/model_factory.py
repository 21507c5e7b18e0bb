"""Small random models of every family, and a dense attention context."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from loramux.kernels.ops import AttendArgs

SLIDING_WINDOW = 8

# Family -> (transformers config class, what it changes).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2}),
    "llama31": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "yarn": (
        "Qwen3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "smollm2": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": SLIDING_WINDOW},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {}),
    "phi4_mini": (
        "Phi3Config",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1 + i / 9 for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0156,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2Config", {}),
    "glm4": (
        "Glm4Config",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
}
# These differ in the ops of a layer: biases, windows, head norms, sandwich norms, softcaps.
OP_FAMILIES = ("llama31", "qwen2", "qwen3", "gemma2", "gemma3")
MODEL_CLASSES = {
    "LlamaConfig": "LlamaForCausalLM",
    "MistralConfig": "MistralForCausalLM",
    "Qwen2Config": "Qwen2ForCausalLM",
    "Qwen3Config": "Qwen3ForCausalLM",
    "Gemma2Config": "Gemma2ForCausalLM",
    "Gemma3TextConfig": "Gemma3ForCausalLM",
    "Phi3Config": "Phi3ForCausalLM",
    "GraniteConfig": "GraniteForCausalLM",
    "SmolLM3Config": "SmolLM3ForCausalLM",
    "Olmo2Config": "Olmo2ForCausalLM",
    "Glm4Config": "Glm4ForCausalLM",
    "MinistralConfig": "MinistralForCausalLM",
    "Ministral3Config": "Ministral3ForCausalLM",
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """Make a transformers config: hidden 64, 3 layers, 4 heads over 2, vocabulary 256."""
    config_class, changes = FAMILIES[family]
    settings = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
        **overrides,
    }
    return getattr(transformers, config_class)(**settings)


def tiny_transformers_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Make a model with random norms and biases too, so that a missing one is detected."""
    config = tiny_config(family, **overrides)
    model_class = getattr(transformers, MODEL_CLASSES[type(config).__name__])
    generator = torch.Generator().manual_seed(seed)
    # Gemma2 has no other kind that knows the softcap.
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name
        parameter.data = 1.0 + 0.2 * noise if is_norm else 0.15 * noise
    model.tie_weights()
    return model.eval()


_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 3, 3],
    }
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "intermediate_size": 48,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Family -> (prefix of the transformers classes, text settings, vision settings).
VISION_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", _TEXT | _MROPE, _QWEN_VISION),
    "qwen3_vl": (
        "Qwen3VL",
        _TEXT | {"head_dim": 16} | _MROPE,
        _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "gemma3_vl": (
        "Gemma3",
        _TEXT | {"head_dim": 16, "sliding_window": SLIDING_WINDOW},
        _SIGLIP,
    ),
    "mistral3_vl": (
        "Mistral3",
        _TEXT | {"head_dim": 16, "model_type": "mistral", "sliding_window": None},
        _SIGLIP | {"model_type": "pixtral", "head_dim": 16},
    ),
}


def tiny_vision_model(family: str, seed: int = 0) -> Any:
    """Make a vision model whose text part and image encoder are random."""
    prefix, text, vision = VISION_FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    config.get_text_config().tie_word_embeddings = False
    model_class = getattr(transformers, f"{prefix}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1.0 + 0.2 * noise if "norm" in name else 0.15 * noise
    return model.eval()


def save_hf_folder(model: Any, folder: Path) -> Path:
    """Save config.json and model.safetensors with transformers."""
    model.save_pretrained(folder)
    return folder


@dataclass
class DenseAttention:
    """Attention context of one sequence that keeps all keys and values in dense tensors."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.keys[layer] = append(self.keys.get(layer), k)
        self.values[layer] = append(self.values.get(layer), v)

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        keys, values = self.keys[args.layer], self.values[args.layer]
        repeats = q.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeats, dim=1))
        scores = scores * args.scale
        if args.softcap is not None:
            scores = torch.tanh(scores / args.softcap) * args.softcap
        distance = torch.arange(keys.shape[0])[-q.shape[0] :, None] - torch.arange(keys.shape[0])
        hidden = (distance < 0) | (distance >= (args.sliding_window or keys.shape[0]))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeats, dim=1))
        return mixed.reshape(q.shape[0], -1)


def append(kept: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if kept is None else torch.cat((kept, new))
