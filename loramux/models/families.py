"""The served model families: how each differs from the others, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.types.model import MLP_BLOCK, NormNames

FULL, SLIDING = "full_attention", "sliding_attention"


class HeadNormScope(Enum):
    """What the norm of queries and keys before their rotation computes its mean over."""

    HEAD = auto()
    """Each head."""
    PROJECTION = auto()
    """All heads of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Config keys and names of a mixture of experts; the score of an expert is its softmax."""

    count_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    size_key: str = "moe_intermediate_size"
    normalises: bool | str = "norm_topk_prob"
    """Whether the scores of the chosen experts are divided by their sum."""
    block: str = MLP_BLOCK
    """Submodule of a layer that holds `gate`, the router, and `experts`."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The options of a family. A string in place of a bool names the config key to read."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the keys that config.json may omit."""
    layer_types: Callable[[Mapping[str, Any]], list[str]]
    activation_key: str = "hidden_act"
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    qk_norm: HeadNormScope | None = None
    norm_plus_one: bool = False
    norm_names: NormNames = NormNames()
    scales_embeddings: bool = False
    """Embeddings are multiplied by the square root of their size."""
    query_scale_key: str | None = None
    """Config key whose value to the power -1/2 scales the scores; None for head_dim."""
    has_multipliers: bool = False
    """config.json has the multipliers of Granite."""
    has_rope_scale_of_queries: bool = False
    """Queries beyond the original context are scaled, which is not computed: the context ends."""
    rotates_pairs: bool = False
    """Rotates dimension 2i with 2i + 1 instead of i with i + size / 2."""
    no_rope_layers: Callable[[Mapping[str, Any]], list[bool]] | None = None
    attn_softcap_key: str | None = None
    final_softcap_key: str | None = None
    local_rope: bool = False
    experts: ExpertNames | None = None
    """The MLP of every layer is a mixture of experts."""


def all_full(config: Mapping[str, Any]) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def all_sliding(config: Mapping[str, Any]) -> list[str]:
    return [SLIDING] * config["num_hidden_layers"]


def sliding_if_enabled(config: Mapping[str, Any]) -> list[str]:
    if not config["use_sliding_window"]:
        return all_full(config)
    given = config.get("layer_types")
    first = config["max_window_layers"]
    return given or [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def sliding_by_pattern(config: Mapping[str, Any]) -> list[str]:
    """Sliding windows, with full attention in every n-th layer."""
    given = config.get("layer_types")
    every = config["sliding_window_pattern"]
    return given or [
        FULL if (i + 1) % every == 0 else SLIDING for i in range(config["num_hidden_layers"])
    ]


def as_given(config: Mapping[str, Any]) -> list[str]:
    """Sliding windows where `layer_types` says so."""
    return config.get("layer_types") or all_full(config)


def without_rope(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has no rotary embedding (SmolLM3)."""
    given = config.get("no_rope_layers")
    every = config["no_rope_layer_interval"]
    count = config["num_hidden_layers"]
    if given is not None and len(given) != count:
        raise UnsupportedModel(f"config.json lists {len(given)} no_rope_layers for {count} layers.")
    return [not has for has in given or [(i + 1) % every != 0 for i in range(count)]]


COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "partial_rotary_factor": 1.0,
}
SANDWICH = NormNames(
    mlp="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GEMMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        defaults={"max_position_embeddings": 2048}, layer_types=all_full, mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Architecture(
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        layer_types=all_sliding,
        qkv_bias=False,
        o_bias=False,
    ),
    "Qwen2ForCausalLM": Architecture(
        defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32},
        layer_types=sliding_if_enabled,
        qkv_bias=True,
        o_bias=False,
    ),
    "Qwen3ForCausalLM": Architecture(
        defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
        layer_types=sliding_if_enabled,
        qk_norm=HeadNormScope.HEAD,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        layer_types=sliding_if_enabled,
        qk_norm=HeadNormScope.HEAD,
        experts=ExpertNames(),
    ),
    "MixtralForCausalLM": Architecture(
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        layer_types=all_sliding,
        qkv_bias=False,
        o_bias=False,
        experts=ExpertNames(
            size_key="intermediate_size",
            normalises=True,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "OlmoeForCausalLM": Architecture(
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        layer_types=all_full,
        qk_norm=HeadNormScope.PROJECTION,
        experts=ExpertNames(size_key="intermediate_size"),
    ),
    "Gemma2ForCausalLM": Architecture(
        defaults=GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        layer_types=sliding_by_pattern,
        activation_key="hidden_activation",
        norm_plus_one=True,
        norm_names=SANDWICH,
        scales_embeddings=True,
        query_scale_key="query_pre_attn_scalar",
        attn_softcap_key="attn_logit_softcapping",
        final_softcap_key="final_logit_softcapping",
    ),
    "Gemma3ForCausalLM": Architecture(
        defaults=GEMMA_DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window_pattern": 6},
        layer_types=sliding_by_pattern,
        activation_key="hidden_activation",
        qk_norm=HeadNormScope.HEAD,
        norm_plus_one=True,
        norm_names=SANDWICH,
        scales_embeddings=True,
        query_scale_key="query_pre_attn_scalar",
        final_softcap_key="final_logit_softcapping",
        local_rope=True,
    ),
    "MinistralForCausalLM": Architecture(
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        layer_types=as_given,
        qkv_bias=False,
        o_bias=False,
    ),
    "Ministral3ForCausalLM": Architecture(
        defaults={"max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128},
        layer_types=as_given,
        qkv_bias=False,
        o_bias=False,
        has_rope_scale_of_queries=True,
    ),
    "Phi3ForCausalLM": Architecture(
        defaults={"max_position_embeddings": 4096, "sliding_window": None, "rms_norm_eps": 1e-5},
        layer_types=all_sliding,
        qkv_bias=False,
        o_bias=False,
        has_fused_qkv=True,
        has_fused_gate_up=True,
    ),
    "GraniteForCausalLM": Architecture(
        defaults={"max_position_embeddings": 2048},
        layer_types=all_full,
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "SmolLM3ForCausalLM": Architecture(
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "sliding_window": None,
        },
        layer_types=as_given,
        mlp_bias="mlp_bias",
        no_rope_layers=without_rope,
    ),
    "Olmo2ForCausalLM": Architecture(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        layer_types=all_full,
        qk_norm=HeadNormScope.PROJECTION,
        norm_names=NormNames(
            attention=None,
            mlp=None,
            after_attention="post_attention_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
    ),
    "Glm4ForCausalLM": Architecture(
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
        },
        layer_types=all_full,
        o_bias=False,
        has_fused_gate_up=True,
        norm_names=NormNames(
            after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
        ),
        rotates_pairs=True,
    ),
}
