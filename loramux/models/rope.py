"""Rotary embedding settings of config.json, in the formats of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loramux.errors import UnsupportedModel

DEFAULT_THETA = 10_000.0

# Supported rope types and their required settings.
REQUIRED_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    """Factor by which the context is extended; unused by `default`."""
    original_max_position: int = 0
    """Context length of the pretraining; used by llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn); None derives it from `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None


def parse_rope(config: Mapping[str, Any], *, theta: float = DEFAULT_THETA) -> RopeConfig:
    """Parse the rope of a model, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    settings.setdefault("rope_theta", config.get("rope_theta", theta))
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return rope_from_settings(settings, config)


def parse_layer_type_rope(
    config: Mapping[str, Any], *, layer_type: str, theta_key: str, theta: float
) -> RopeConfig:
    """Parse the rope of one layer type, for models with a separate rope per layer type."""
    settings = dict((config.get("rope_parameters") or {}).get(layer_type) or {})
    if layer_type == "full_attention":
        settings.update(config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get(theta_key, theta))
    return rope_from_settings(settings, config)


def rope_from_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> RopeConfig:
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in REQUIRED_SETTINGS:
        raise UnsupportedModel(
            f"Rope type {rope_type!r} is not supported; valid values: "
            f"{', '.join(sorted(REQUIRED_SETTINGS))}."
        )
    missing = [name for name in REQUIRED_SETTINGS[rope_type] if settings.get(name) is None]
    if missing:
        raise UnsupportedModel(
            f"Rope type {rope_type!r} needs {', '.join(missing)} in config.json, which lacks it."
        )
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported: "
            "only models that rotate whole heads can be served."
        )
    original = config.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    optional = {
        name: settings[name]
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        if settings.get(name) is not None
    }
    return RopeConfig(
        rope_type=rope_type,
        theta=float(settings["rope_theta"]),
        original_max_position=int(original),
        **optional,
    )
