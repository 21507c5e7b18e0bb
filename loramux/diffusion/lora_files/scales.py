"""The scale of each module: from alpha tensors, from metadata, or 1."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.adapters.images.refusals import ImageRefusal
from loramux.adapters.peft.patterns import first_matches
from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused

_PATTERN = r"(.*\.)?({})"
_KINDS = ("LORA", "LOHA", "LOKR")
METADATA_KEY = "lora_adapter_metadata"
"""Key of diffusers in the safetensors header: LoraConfig fields as `component.field`."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields of a LoraConfig that set the scale of a component's modules."""

    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Module path -> alpha, where a pattern gives it another one."""
    rank: float | None = None
    """By which alpha is divided, if the tensors do not tell the rank."""
    ranks: Mapping[str, float] = field(default_factory=dict)
    """Module path -> rank, where a pattern gives it another one."""

    def alpha(self, path: str) -> float:
        return self.alphas.get(path, self.lora_alpha)

    def scale(self, path: str, rank: int | None) -> float:
        """`rank`: None if the tensors of the module do not tell it."""
        divisor = self.ranks.get(path, self.rank) if self.rank is not None else rank
        if divisor is None:
            return 1.0
        return self.alpha(path) / (math.sqrt(divisor) if self.use_rslora else divisor)


def parse_settings(fields: Mapping[str, Any], paths: Collection[str], where: str) -> LoraSettings:
    """Read a LoraConfig for modules of these paths; refuse fields beyond the scale."""
    _refuse_unserved(fields, where)
    is_lora = _kind(fields) == "LORA"
    try:
        lora_alpha = float(fields.get("lora_alpha" if is_lora else "alpha", 8))
        # LoHa and LoKr of PEFT are divided by the rank of the configuration, whole factors too.
        rank = None if is_lora else float(fields.get("r", 8))
        alphas, ranks = (_patterns(fields, name) for name in ("alpha_pattern", "rank_pattern"))
    except (TypeError, ValueError, AttributeError) as error:
        raise _bad(where, str(error)) from error
    if not all(map(math.isfinite, (lora_alpha, *alphas.values(), *ranks.values()))):
        raise _bad(where, "an alpha or a rank is not finite")
    if not is_lora and not all(value > 0 for value in (rank or 0.0, *ranks.values())):
        raise _bad(where, "a rank is not positive")
    return LoraSettings(
        lora_alpha,
        bool(fields.get("use_rslora")),
        bool(fields.get("use_dora")),
        _by_path("alpha_pattern", alphas, paths),
        rank,
        {} if is_lora else _by_path("rank_pattern", ranks, paths),
    )


def _patterns(fields: Mapping[str, Any], name: str) -> dict[str, float]:
    return {str(key): float(value) for key, value in (fields.get(name) or {}).items()}


def _by_path(name: str, given: Mapping[str, float], paths: Collection[str]) -> Mapping[str, float]:
    """Return the values of the patterns by the modules that match them."""
    if not given:
        return {}
    patterns, keys = list(given), sorted(paths)
    hits = first_matches(name, patterns, keys, template=_PATTERN, whole=True)
    return {
        key: given[patterns[hit[0]]] for key, hit in zip(keys, hits, strict=True) if hit is not None
    }


def _kind(fields: Mapping[str, Any]) -> str:
    return str(fields.get("peft_type", "LORA"))


def _refuse_unserved(fields: Mapping[str, Any], where: str) -> None:
    if fields.get("fan_in_fan_out"):
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"{where} has fan_in_fan_out, which is not served.",
            fix="Train without fan_in_fan_out.",
        )
    kind = _kind(fields)
    if kind not in _KINDS or fields.get("modules_to_save"):
        what = f"of the kind {kind}" if kind not in _KINDS else "with modules_to_save"
        raise AdapterRefused(
            ImageRefusal.UNSERVED_METHOD,
            f"{where} is {what}; LoRA, LoHa and LoKr are served.",
            fix="Train it as LoRA.",
        )


def settings_in_header(
    metadata: Mapping[str, str], paths: Mapping[str, Collection[str]]
) -> dict[str, LoraSettings]:
    """Return the settings that diffusers wrote into a file's header, by component.

    `paths`: the modules of each component of the model.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    try:
        fields = json.loads(text)
        components: dict[str, dict[str, Any]] = {}
        for key, value in fields.items():
            component, _, name = key.partition(".")
            components.setdefault(component, {})[name] = value
    except (ValueError, AttributeError) as error:
        raise _bad(METADATA_KEY, str(error)) from error
    return {
        component: parse_settings(given, paths.get(component, ()), f"{METADATA_KEY} of {component}")
        for component, given in components.items()
    }


def _bad(where: str, detail: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.BAD_VALUE, f"{where} cannot be read: {detail}.", fix="Save the adapter again."
    )
