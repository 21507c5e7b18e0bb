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

    def alpha(self, path: str) -> float:
        return self.alphas.get(path, self.lora_alpha)

    def scale(self, path: str, rank: int) -> float:
        return self.alpha(path) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_settings(fields: Mapping[str, Any], paths: Collection[str], where: str) -> LoraSettings:
    """Reads a LoraConfig for modules of these paths; refuses fields beyond the scale."""
    _refuse_unserved(fields, where)
    try:
        lora_alpha = float(fields.get("lora_alpha", 8))
        given = {str(key): float(a) for key, a in (fields.get("alpha_pattern") or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise _bad(where, str(error)) from error
    if not all(map(math.isfinite, (lora_alpha, *given.values()))):
        raise _bad(where, "an alpha is not finite")
    alphas: dict[str, float] = {}
    if given:
        patterns, keys = list(given), sorted(paths)
        hits = first_matches("alpha_pattern", patterns, keys, template=_PATTERN, whole=True)
        alphas = {
            key: given[patterns[hit[0]]]
            for key, hit in zip(keys, hits, strict=True)
            if hit is not None
        }
    return LoraSettings(
        lora_alpha, bool(fields.get("use_rslora")), bool(fields.get("use_dora")), alphas
    )


def _refuse_unserved(fields: Mapping[str, Any], where: str) -> None:
    for name in ("lora_bias", "fan_in_fan_out"):
        if fields.get(name):
            raise AdapterRefused(
                RefusalCode.UNSUPPORTED_FIELD,
                f"{where} has {name}, which is not served.",
                fix=f"Train without {name}.",
            )
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA" or fields.get("modules_to_save"):
        what = f"of the kind {kind}" if kind != "LORA" else "with modules_to_save"
        raise AdapterRefused(
            ImageRefusal.UNSERVED_METHOD,
            f"{where} is {what}; plain LoRA is served.",
            fix="Convert it to LoRA.",
        )


def settings_in_header(
    metadata: Mapping[str, str], paths: Mapping[str, Collection[str]]
) -> dict[str, LoraSettings]:
    """Returns the settings that diffusers wrote into a file's header, by component.

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
