"""The stable codes of the reasons for which an adapter is refused."""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    # The folder
    UNREADABLE = "unreadable"
    LINK_OUTSIDE = "link_outside"
    # adapter_config.json
    CONFIG_MISSING = "config_missing"
    CONFIG_TOO_LARGE = "config_too_large"
    CONFIG_NOT_JSON = "config_not_json"
    NOT_LORA = "not_lora"
    WRONG_TYPE = "wrong_type"
    BAD_VALUE = "bad_value"
    BAD_PATTERN = "bad_pattern"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    CHANGES_BASE = "changes_base"
    OTHER_BASE = "other_base"
    NO_TARGETS = "no_targets"
    UNSUPPORTED_TARGET = "unsupported_target"
    RANK_OVER_CAP = "rank_over_cap"
    # adapter_model.safetensors as a file
    WEIGHTS_MISSING = "weights_missing"
    PICKLE = "pickle"
    LFS_POINTER = "lfs_pointer"
    NOT_SAFETENSORS = "not_safetensors"
    OVERSIZED_HEADER = "oversized_header"
    BROKEN_SAFETENSORS = "broken_safetensors"
    TRUNCATED = "truncated"
    TOO_LARGE = "too_large"
    BAD_DTYPE = "bad_dtype"
    # The tokenizer files
    TOKENIZER_TOO_LARGE = "tokenizer_too_large"
    BROKEN_TOKENIZER = "broken_tokenizer"
    FOREIGN_TOKENIZER = "foreign_tokenizer"
    # Its tensors
    NO_TENSORS = "no_tensors"
    UNKNOWN_TENSORS = "unknown_tensors"
    DORA_TENSORS = "dora_tensors"
    BIAS_TENSORS = "bias_tensors"
    FULL_WEIGHTS = "full_weights"
    DUPLICATE_TENSORS = "duplicate_tensors"
    INCOMPLETE_PAIR = "incomplete_pair"
    EMPTY_TENSOR = "empty_tensor"
    WRONG_SHAPE = "wrong_shape"
    LAYER_OUT_OF_RANGE = "layer_out_of_range"
    MISSING_TENSORS = "missing_tensors"
    UNTARGETED_TENSORS = "untargeted_tensors"
    WRONG_RANK = "wrong_rank"
    NOT_FINITE = "not_finite"
    NO_EFFECT = "no_effect"


def name_some(names: list[str], *, limit: int = 3) -> str:
    """Return the first few names, followed by the number of the others."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
