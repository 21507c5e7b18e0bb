"""The text part of a vision model's config.json, in the form of a text model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loramux.errors import UnsupportedModel

# Architecture of a vision model -> that of its text part; by model_type where it has several.
TEXT_PARTS: dict[str, str | dict[str, str]] = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}
# Settings that a vision model may keep outside of its text part.
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")


def is_vision_model(hf_config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a vision model whose text part can be served."""
    return _name(hf_config) is not None


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text part of a vision model; other configs as they are."""
    name = _name(hf_config)
    if name is None:
        return hf_config
    # transformers 4 wrote the settings of Qwen2.5-VL without a part of their own.
    text = dict(hf_config.get("text_config") or hf_config)
    for key in _OUTER:
        if key in hf_config and text.get(key) is None:
            text[key] = hf_config[key]
    part = TEXT_PARTS[name]
    if isinstance(part, dict):
        model_type = str(text.get("model_type"))
        if model_type not in part:
            raise UnsupportedModel(
                f"The text part of this {name} is {model_type}, which is not supported; valid "
                f"values: {', '.join(part)}."
            )
        part = part[model_type]
    return {**text, "architectures": [part]}


def _name(hf_config: Mapping[str, Any]) -> str | None:
    names = hf_config.get("architectures") or []
    return next((name for name in names if name in TEXT_PARTS), None)
