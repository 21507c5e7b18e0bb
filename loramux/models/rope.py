"""Rotary embedding settings of config.json, in the formats of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loramux.errors import UnsupportedModel

DEFAULT_THETA = 10_000.0

# Supported rope types and their required settings.
REQUIRED_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
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
    rotated_fraction: float = 1.0
    """Fraction of a head's dimensions that are rotated: the first ones of the checkpoint."""
    rotates_pairs: bool = False
    """Whether dimension 2i is rotated with 2i + 1, instead of i with i + half of the rotated."""
    factors: tuple[float, ...] = ()
    """Divisor of each frequency (longrope)."""

    def num_rotated(self, head_dim: int) -> int:
        return int(head_dim * self.rotated_fraction)


NO_ROPE = RopeConfig(rotated_fraction=0.0)
"""Rope of layers without positions."""


def head_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...] | None:
    """Return the checkpoint row of each row of a head in the engine; None: the order is the same.

    The engine rotates row i with row i + head_dim / 2.
    """
    rotated = rope.num_rotated(head_dim)
    half = rotated // 2
    if rope.rotates_pairs:
        first, second = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    else:
        first, second = list(range(half)), list(range(half, rotated))
    fixed = list(range(rotated, head_dim))
    middle = len(fixed) // 2
    order = (*first, *fixed[:middle], *second, *fixed[middle:])
    return None if order == tuple(range(head_dim)) else order


def parse_rope(
    config: Mapping[str, Any],
    *,
    theta: float = DEFAULT_THETA,
    rotates_pairs: bool = False,
    max_model_len: int | None = None,
) -> RopeConfig:
    """Parse the rope of a model, from `rope_parameters` or `rope_theta` and `rope_scaling`.

    max_model_len: the context that is served; None for that of the config
    """
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    settings.setdefault("rope_theta", config.get("rope_theta", theta))
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rope = rope_from_settings(settings, config, max_model_len)
    return replace(rope, rotates_pairs=rotates_pairs)


def parse_layer_type_rope(
    config: Mapping[str, Any], *, layer_type: str, theta_key: str, theta: float
) -> RopeConfig:
    """Parse the rope of one layer type, for models with a separate rope per layer type."""
    settings = dict((config.get("rope_parameters") or {}).get(layer_type) or {})
    if layer_type == "full_attention":
        settings.update(config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get(theta_key, theta))
    return rope_from_settings(settings, config)


def rope_from_settings(
    settings: Mapping[str, Any], config: Mapping[str, Any], max_model_len: int | None = None
) -> RopeConfig:
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type == "mrope":  # Positions of text are equal in all its sections: the plain rope.
        rope_type = "default"
    if rope_type == "su":  # Its name in the first Phi-3 checkpoints.
        rope_type = "longrope"
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
    original = config.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    optional: dict[str, Any] = {
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
    if rope_type == "longrope":
        optional |= longrope_settings(settings, config, int(original), max_model_len)
    return RopeConfig(
        rope_type=rope_type,
        theta=float(settings["rope_theta"]),
        original_max_position=int(original),
        rotated_fraction=float(settings.get("partial_rotary_factor") or 1.0),
        **optional,
    )


def longrope_settings(
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    original: int,
    max_model_len: int | None,
) -> dict[str, Any]:
    """Return the factors of the context that is served, and the factor of cos and sin.

    One list serves all lengths, since cached keys keep the rotation that they were stored with.
    """
    longest = int(config["max_position_embeddings"])
    is_long = (max_model_len or longest) > original
    factors = tuple(
        float(value) for value in settings["long_factor" if is_long else "short_factor"]
    )
    factor = float(settings.get("factor") or longest / original)
    scale = settings.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {"factors": factors, "factor": factor, "attention_factor": float(scale)}
