"""Parse config.json into the config of the one decoder, by the data of the model's family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.models.families import (
    ARCHITECTURES,
    COMMON_DEFAULTS,
    FULL,
    SLIDING,
    Architecture,
    ExpertNames,
    HeadNormScope,
)
from loramux.models.quantised.config import parse_quantisation
from loramux.models.rope import (
    NO_ROPE,
    RopeConfig,
    head_order,
    parse_layer_type_rope,
    parse_rope,
)
from loramux.models.text_config import TEXT_PARTS, is_vision_model, text_config
from loramux.types.model import (
    ATTENTION_BLOCK,
    TEXT_PREFIX,
    BaseModelInfo,
    LinearSpec,
    NormNames,
    RowMap,
)
from loramux.types.quantisation import Quantisation

# The second is of older releases of llm-compressor.
QUANTISATION_KEYS = ("quantization_config", "compression_config")
ROUTER = "router"
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
class ExpertsConfig:
    """The experts of a layer, each a gated MLP, and how a token's experts are chosen."""

    names: ExpertNames
    count: int
    num_chosen: int
    """Experts that a token passes through."""
    intermediate_size: int
    normalises: bool
    """The scores of a token's experts are divided by their sum."""


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
    ropes: tuple[RopeConfig, ...]
    """The rotary embeddings of the model, one or two."""
    layer_ropes: tuple[int, ...]
    """Per layer: its index in `ropes`."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: positions that a query attends to, itself included; None for all."""
    activation: str
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    has_fused_qkv: bool
    """The checkpoint has queries, keys and values as one projection."""
    has_fused_gate_up: bool
    qk_norm: HeadNormScope | None
    """Norm of queries and keys before the rotation."""
    norm_plus_one: bool
    """The checkpoint stores norm weights minus one."""
    norm_names: NormNames
    embed_scale: float
    rounds_embed_scale: bool
    """The scale is rounded to the dtype of the weights, as in training."""
    logit_scale: float
    """Multiplies the normed hidden state before the output head."""
    query_scale: float
    """Multiplies the attention scores."""
    attn_logit_softcap: float | None
    final_logit_softcap: float | None
    experts: ExpertsConfig | None = None
    """The mixture of experts of every layer; None: one gated MLP."""
    num_labels: int = 0
    """Outputs of the classification head, which is then the output head; 0: it has none."""
    is_vision_model: bool = False
    """The checkpoint has an image encoder, whose tensors are not read."""
    quantisation: Quantisation | None = None
    """How the checkpoint stores its weights; None: in floating point."""

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

    @property
    def has_wide_norm(self) -> bool:
        """Whether queries and keys are normed over all heads of a token."""
        return self.qk_norm is HeadNormScope.PROJECTION


# transformers names the text part of a vision model in one of these ways.
VISION_PREFIXES = (TEXT_PREFIX, "model.language_model.", "language_model.model.")
_CAUSAL, _LABELS, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
HEADS = {_CAUSAL: HeadKind.TOKENS, _LABELS: HeadKind.LABELS, _BARE: HeadKind.NONE}
DEFAULT_LABELS = ("LABEL_0", "LABEL_1")


def parse_config(
    hf_config: Mapping[str, Any], *, max_model_len: int | None = None
) -> DecoderConfig:
    """Parse a config.json written by transformers 4 or 5.

    max_model_len: the context that is served, which decides between the two lists of longrope;
    None for the longest
    """
    text = text_config(hf_config)
    name, kind = architecture_name(text), head_kind(text)
    spec = ARCHITECTURES[name]
    config = {**COMMON_DEFAULTS, **spec.defaults, **text}
    refuse_unsupported(config)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{num_heads} heads of {head_dim} over {num_kv_heads} key-value heads in config.json: "
            "heads must divide evenly and have an even size."
        )
    max_position = longest_context(config, spec)
    ropes, layer_ropes = parse_ropes(config, spec, min(max_model_len or max_position, max_position))
    added = residual_multiplier(config, spec)
    return DecoderConfig(
        architecture=name,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=float(config["rms_norm_eps"]) / added**2,
        ropes=ropes,
        layer_ropes=layer_ropes,
        sliding_windows=sliding_windows(config, spec),
        activation=activation(config, spec),
        tie_embeddings=ties_embeddings(config, kind),
        qkv_bias=flag(config, spec.qkv_bias),
        o_bias=flag(config, spec.o_bias),
        mlp_bias=flag(config, spec.mlp_bias),
        has_fused_qkv=spec.has_fused_qkv,
        has_fused_gate_up=spec.has_fused_gate_up,
        qk_norm=spec.qk_norm,
        norm_plus_one=spec.norm_plus_one,
        norm_names=spec.norm_names,
        embed_scale=embed_scale(config, spec) / added,
        rounds_embed_scale=spec.scales_embeddings,
        logit_scale=1 / config.get("logits_scaling", 1.0) if spec.has_multipliers else 1.0,
        query_scale=query_scale(config, spec, head_dim),
        attn_logit_softcap=config.get(spec.attn_softcap_key) if spec.attn_softcap_key else None,
        final_logit_softcap=final_softcap(config, spec, kind),
        experts=None if spec.experts is None else parse_experts(config, spec.experts),
        num_labels=len(labels_of(config)) if kind is HeadKind.LABELS else 0,
        is_vision_model=is_vision_model(hf_config),
        quantisation=quantisation_of(config),
    )


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Parse how the weights are quantised; raise UnsupportedModel for an unknown format."""
    settings = next((config[key] for key in QUANTISATION_KEYS if config.get(key)), None)
    return parse_quantisation(settings) if settings else None


def parse_experts(config: Mapping[str, Any], names: ExpertNames) -> ExpertsConfig:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel(
            "Some layers have experts and others do not (mlp_only_layers, decoder_sparse_step in "
            "config.json), which is not supported: all layers must have them."
        )
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel("clip_qkv in config.json is not supported.")
    count = next(int(config[key]) for key in names.count_keys if config.get(key))
    num_chosen = int(config["num_experts_per_tok"])
    if not 1 <= num_chosen <= count:
        raise UnsupportedModel(
            f"config.json chooses {num_chosen} of {count} experts (num_experts_per_tok)."
        )
    return ExpertsConfig(
        names=names,
        count=count,
        num_chosen=num_chosen,
        intermediate_size=int(config[names.size_key]),
        normalises=flag(config, names.normalises),
    )


def longest_context(config: Mapping[str, Any], spec: Architecture) -> int:
    settings = config.get("rope_parameters") or {}
    if spec.has_rope_scale_of_queries and settings.get("llama_4_scaling_beta"):
        return int(settings["original_max_position_embeddings"])
    return int(config["max_position_embeddings"])


def residual_multiplier(config: Mapping[str, Any], spec: Architecture) -> float:
    """Return the factor of what a layer adds to the residual stream.

    Residual streams that differ by a factor have the same norms: this one moves to the embedding
    and to epsilon.
    """
    return float(config.get("residual_multiplier", 1.0)) if spec.has_multipliers else 1.0


def embed_scale(config: Mapping[str, Any], spec: Architecture) -> float:
    if spec.has_multipliers:
        return float(config.get("embedding_multiplier", 1.0))
    return float(config["hidden_size"] ** 0.5) if spec.scales_embeddings else 1.0


def query_scale(config: Mapping[str, Any], spec: Architecture, head_dim: int) -> float:
    if spec.has_multipliers:
        return float(config.get("attention_multiplier", 1.0))
    size = config[spec.query_scale_key] if spec.query_scale_key else head_dim
    return float(size**-0.5)


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
    name = _known_names(text_config(hf_config))[0]
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
            f"valid values: {', '.join([*ARCHITECTURES, *TEXT_PARTS])}."
        )
    return str(known[0])


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    missing = [key for key in REQUIRED_KEYS if not config.get(key)]
    if missing:
        raise UnsupportedModel(f"config.json lacks {', '.join(missing)}.")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported: not a causal model.")


def parse_ropes(
    config: Mapping[str, Any], spec: Architecture, max_model_len: int
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Return the rotary embeddings of the model, and the index of each layer's."""
    if not spec.local_rope:
        rope = parse_rope(config, rotates_pairs=spec.rotates_pairs, max_model_len=max_model_len)
        lacks = spec.no_rope_layers(config) if spec.no_rope_layers is not None else []
        layers = [int(lacking) for lacking in lacks] or [0] * config["num_hidden_layers"]
        return (rope, NO_ROPE) if any(layers) else (rope,), tuple(layers)
    full = parse_layer_type_rope(config, layer_type=FULL, theta_key="rope_theta", theta=1_000_000.0)
    local = parse_layer_type_rope(
        config, layer_type=SLIDING, theta_key="rope_local_base_freq", theta=10_000.0
    )
    kinds = spec.layer_types(config)
    return (full, local), tuple(int(kind == SLIDING) for kind in kinds)


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
    linears = linears_of(config)
    return BaseModelInfo(
        name=name,
        architecture=config.architecture,
        num_layers=config.num_layers,
        linears=linears,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_parameters=count_parameters(config, linears),
        tie_embeddings=config.tie_embeddings,
        norm_names=config.norm_names,
        norm_plus_one=config.norm_plus_one,
        num_labels=config.num_labels,
        quantisation="" if config.quantisation is None else config.quantisation.label,
        folded_scales="unknown" if may_fold(config) else "none",
        path_prefixes=VISION_PREFIXES if config.is_vision_model else (TEXT_PREFIX,),
    )


def may_fold(config: DecoderConfig) -> bool:
    return config.quantisation is not None and config.quantisation.folds_scales


def linears_of(config: DecoderConfig) -> tuple[LinearSpec, ...]:
    """Return the linears of a decoder layer, in the order of the checkpoint."""
    mlp = mlp_linears(config) if config.experts is None else expert_linears(config, config.experts)
    return (*attention_linears(config), *mlp)


def attention_linears(config: DecoderConfig) -> tuple[LinearSpec, ...]:
    hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    order = head_order(config.ropes[0], config.head_dim)

    def rotated(num_heads: int) -> RowMap | None:
        return None if order is None else RowMap(num_heads, order)

    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    sizes: tuple[int, ...] = (q_size, kv_size, kv_size)
    maps: tuple[RowMap | None, ...] = (
        rotated(config.num_heads),
        rotated(config.num_kv_heads),
        None,
    )
    if config.has_fused_qkv:
        names, sizes = ("qkv_proj",), (sum(sizes),)
        maps = (rotated(config.num_heads + config.num_kv_heads),)
    block = ATTENTION_BLOCK
    return (
        LinearSpec("qkv", hidden, names, sizes, block, config.qkv_bias, row_maps=maps),
        LinearSpec("o", q_size, ("o_proj",), (hidden,), block, config.o_bias, is_added=True),
    )


def mlp_linears(config: DecoderConfig) -> tuple[LinearSpec, ...]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    names: tuple[str, ...] = ("gate_proj", "up_proj")
    sizes: tuple[int, ...] = (inner, inner)
    if config.has_fused_gate_up:
        names, sizes = ("gate_up_proj",), (2 * inner,)
    return (
        LinearSpec("gate_up", hidden, names, sizes, has_bias=bias, is_gated=True),
        LinearSpec("down", inner, ("down_proj",), (hidden,), has_bias=bias, is_added=True),
    )


def expert_linears(config: DecoderConfig, experts: ExpertsConfig) -> tuple[LinearSpec, ...]:
    """Return the router, and two linears of each expert: adapters change each expert apart."""
    hidden, inner = config.hidden_size, experts.intermediate_size
    block, (gate, up, down) = experts.names.block, experts.names.projections
    specs = [LinearSpec(ROUTER, hidden, ("gate",), (experts.count,), block)]
    for number in range(experts.count):
        path = f"experts.{number}"
        specs += [
            LinearSpec(
                expert_linear(number, "gate_up"),
                hidden,
                (f"{path}.{gate}", f"{path}.{up}"),
                (inner, inner),
                block,
                is_gated=True,
                expert=number,
            ),
            LinearSpec(
                expert_linear(number, "down"),
                inner,
                (f"{path}.{down}",),
                (hidden,),
                block,
                expert=number,
            ),
        ]
    return tuple(specs)


def expert_linear(number: int, name: str) -> str:
    """Return the name of a linear of an expert."""
    return f"expert_{number}_{name}"


def head_linear(config: DecoderConfig) -> LinearSpec:
    """Return the output head: over the vocabulary, or of a classifier."""
    name = "score" if config.num_labels else "lm_head"
    return LinearSpec(name, config.hidden_size, (name,), (config.head_size,), block="")


def count_parameters(config: DecoderConfig, linears: tuple[LinearSpec, ...]) -> int:
    hidden = config.hidden_size
    of_linears = sum(
        linear.num_outputs * (linear.in_features + linear.has_bias) for linear in linears
    )
    norms = hidden * config.norm_names.count
    # The fused head norm repeats the checkpoint's weight once per head.
    head_norms = config.q_size + config.kv_size if config.qk_norm is not None else 0
    embeddings = hidden * (config.vocab_size + (0 if config.tie_embeddings else config.head_size))
    return config.num_layers * (of_linears + norms + head_norms) + embeddings + hidden
