"""Model families as data: how a config.json becomes the config of the one decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.models.rope import RopeConfig, parse_layer_type_rope, parse_rope
from loramux.types.model import BaseModelInfo, Projection

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


class HeadKind(Enum):
    """What a model computes from its hidden states."""

    TOKENS = auto()
    """Logits of the next token."""
    LABELS = auto()
    """Outputs of a classification head."""
    NONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shapes and options of a decoder model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None
    """Rope of the sliding-window layers, if it differs from that of the full-attention ones."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: positions that a query attends to, itself included; None for all."""
    activation: str
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Query and key heads are normed before the rotation."""
    norm_plus_one: bool
    """The checkpoint stores norm weights minus one."""
    sandwich_norms: bool
    """The outputs of attention and MLP are normed as well as their inputs."""
    embed_scale: float
    query_scale: float
    """Multiplies the attention scores."""
    attn_logit_softcap: float | None
    final_logit_softcap: float | None
    num_labels: int = 0
    """Outputs of the classification head, which is then the output head; 0: it has none."""

    @property
    def head_size(self) -> int:
        """Outputs of the output head."""
        return self.num_labels or self.vocab_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


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
    qk_norm: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    scales_embeddings: bool = False
    query_scale_key: str | None = None
    """Config key whose value to the power -1/2 scales the scores; None for head_dim."""
    attn_softcap_key: str | None = None
    final_softcap_key: str | None = None
    local_rope: bool = False


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


COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
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
        qk_norm=True,
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
        sandwich_norms=True,
        scales_embeddings=True,
        query_scale_key="query_pre_attn_scalar",
        attn_softcap_key="attn_logit_softcapping",
        final_softcap_key="final_logit_softcapping",
    ),
    "Gemma3ForCausalLM": Architecture(
        defaults=GEMMA_DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window_pattern": 6},
        layer_types=sliding_by_pattern,
        activation_key="hidden_activation",
        qk_norm=True,
        norm_plus_one=True,
        sandwich_norms=True,
        scales_embeddings=True,
        query_scale_key="query_pre_attn_scalar",
        final_softcap_key="final_logit_softcapping",
        local_rope=True,
    ),
}


_CAUSAL, _LABELS, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
HEADS = {_CAUSAL: HeadKind.TOKENS, _LABELS: HeadKind.LABELS, _BARE: HeadKind.NONE}
DEFAULT_LABELS = ("LABEL_0", "LABEL_1")


def parse_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """Parse a config.json written by transformers 4 or 5."""
    name = architecture_name(hf_config)
    kind = head_kind(hf_config)
    spec = ARCHITECTURES[name]
    config = {**COMMON_DEFAULTS, **spec.defaults, **hf_config}
    refuse_unsupported(config)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{num_heads} heads of {head_dim} over {num_kv_heads} key-value heads in config.json: "
            "heads must divide evenly and have an even size."
        )
    query_scale_from = config[spec.query_scale_key] if spec.query_scale_key else head_dim
    rope, rope_local = parse_ropes(config, spec)
    return DecoderConfig(
        architecture=name,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=int(config["max_position_embeddings"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=rope,
        rope_local=rope_local,
        sliding_windows=sliding_windows(config, spec),
        activation=activation(config, spec),
        tie_embeddings=ties_embeddings(config, kind),
        qkv_bias=flag(config, spec.qkv_bias),
        o_bias=flag(config, spec.o_bias),
        mlp_bias=flag(config, spec.mlp_bias),
        qk_norm=spec.qk_norm,
        norm_plus_one=spec.norm_plus_one,
        sandwich_norms=spec.sandwich_norms,
        embed_scale=config["hidden_size"] ** 0.5 if spec.scales_embeddings else 1.0,
        query_scale=query_scale_from**-0.5,
        attn_logit_softcap=config.get(spec.attn_softcap_key) if spec.attn_softcap_key else None,
        final_logit_softcap=final_softcap(config, spec, kind),
        num_labels=len(labels_of(config)) if kind is HeadKind.LABELS else 0,
    )


def ties_embeddings(config: Mapping[str, Any], kind: HeadKind) -> bool:
    """Whether the output head is the embedding; a model without a head never uses it."""
    is_tied = bool(config["tie_word_embeddings"])
    return kind is HeadKind.NONE or (is_tied and kind is HeadKind.TOKENS)


def final_softcap(config: Mapping[str, Any], spec: Architecture, kind: HeadKind) -> float | None:
    if spec.final_softcap_key is None or kind is HeadKind.LABELS:
        return None
    cap: float | None = config.get(spec.final_softcap_key)
    return cap


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a sequence classifier in the order of its outputs."""
    given = config.get("id2label")
    if not given:
        return DEFAULT_LABELS
    return tuple(str(given[key]) for key in sorted(given, key=int))


def head_kind(hf_config: Mapping[str, Any]) -> HeadKind:
    """Return what the model named first among `architectures` computes."""
    name = _known_names(hf_config)[0]
    return next(kind for suffix, kind in HEADS.items() if name.endswith(suffix))


def _known_names(hf_config: Mapping[str, Any]) -> list[str]:
    known = [name for name in hf_config.get("architectures") or [] if _family(name) is not None]
    if not known:
        architecture_name(hf_config)
    return known


def _family(name: str) -> str | None:
    """Return the key of ARCHITECTURES; Gemma 3's own model is a TextModel."""
    for suffix in HEADS:
        stem = name.removesuffix(suffix).removesuffix("Text") if name.endswith(suffix) else ""
        if stem + _CAUSAL in ARCHITECTURES:
            return stem + _CAUSAL
    return None


def architecture_name(hf_config: Mapping[str, Any]) -> str:
    names = hf_config.get("architectures") or []
    known = [family for name in names if (family := _family(name)) is not None]
    if not known:
        raise UnsupportedModel(
            f"Architecture {', '.join(names) or '(none in config.json)'} is not supported; "
            f"valid values: {', '.join(ARCHITECTURES)}."
        )
    return str(known[0])


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    missing = [key for key in REQUIRED_KEYS if not config.get(key)]
    if missing:
        raise UnsupportedModel(f"config.json lacks {', '.join(missing)}.")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"The weights are quantized ({method}), which is not supported: "
            "use the unquantized checkpoint."
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported: not a causal model.")


def parse_ropes(
    config: Mapping[str, Any], spec: Architecture
) -> tuple[RopeConfig, RopeConfig | None]:
    if not spec.local_rope:
        return parse_rope(config), None
    full = parse_layer_type_rope(config, layer_type=FULL, theta_key="rope_theta", theta=1_000_000.0)
    local = parse_layer_type_rope(
        config, layer_type=SLIDING, theta_key="rope_local_base_freq", theta=10_000.0
    )
    return full, local


def sliding_windows(config: Mapping[str, Any], spec: Architecture) -> tuple[int | None, ...]:
    windows = windows_of(spec.layer_types(config), config)
    given = config.get("layer_types")
    if given and windows_of(given, config) != windows:
        raise UnsupportedModel(
            "layer_types in config.json contradicts what this architecture does with its other "
            "sliding window settings."
        )
    return windows


def windows_of(layer_types: list[str], config: Mapping[str, Any]) -> tuple[int | None, ...]:
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"Layer type {', '.join(unknown)} in config.json is not supported.")
    if len(layer_types) != config["num_hidden_layers"]:
        raise UnsupportedModel(
            f"config.json lists {len(layer_types)} layer_types for "
            f"{config['num_hidden_layers']} layers."
        )
    window = config["sliding_window"]
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def activation(config: Mapping[str, Any], spec: Architecture) -> str:
    name = str(config[spec.activation_key])
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"Activation {name!r} is not supported; valid values: {', '.join(ACTIVATIONS)}."
        )
    return name


def flag(config: Mapping[str, Any], rule: bool | str) -> bool:
    return bool(config[rule]) if isinstance(rule, str) else rule


def base_info(config: DecoderConfig, name: str) -> BaseModelInfo:
    """Describe the shapes of a model of this config."""
    projections = projections_of(config)
    return BaseModelInfo(
        name=name,
        architecture=config.architecture,
        num_layers=config.num_layers,
        projections=projections,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_parameters=count_parameters(config, projections),
        tie_embeddings=config.tie_embeddings,
        biased=tuple(name for name, has_bias in projection_biases(config).items() if has_bias),
        sandwich_norms=config.sandwich_norms,
        norm_plus_one=config.norm_plus_one,
        num_labels=config.num_labels,
    )


def projections_of(config: DecoderConfig) -> tuple[Projection, ...]:
    """The linear layers of one decoder layer, in the order of the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.q_size, config.kv_size
    return (
        Projection("q_proj", hidden, q_size),
        Projection("k_proj", hidden, kv_size),
        Projection("v_proj", hidden, kv_size),
        Projection("o_proj", q_size, hidden),
        Projection("gate_proj", hidden, inner),
        Projection("up_proj", hidden, inner),
        Projection("down_proj", inner, hidden),
    )


def projection_biases(config: DecoderConfig) -> dict[str, bool]:
    """Whether each projection of a decoder layer has a bias."""
    return {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        "o_proj": config.o_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias),
    }


def count_parameters(config: DecoderConfig, projections: tuple[Projection, ...]) -> int:
    hidden = config.hidden_size
    has_bias = projection_biases(config)
    linears = sum(
        linear.out_features * (linear.in_features + has_bias[linear.name]) for linear in projections
    )
    norms = hidden * (4 if config.sandwich_norms else 2)
    # The fused head norm repeats the checkpoint's weight once per head.
    head_norms = (config.q_size + config.kv_size) if config.qk_norm else 0
    embeddings = hidden * (config.vocab_size + (0 if config.tie_embeddings else config.head_size))
    return config.num_layers * (linears + norms + head_norms) + embeddings + hidden
