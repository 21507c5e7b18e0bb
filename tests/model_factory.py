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
