"""Activated LoRA (aLoRA): an adapter that acts from its invocation tokens on."""

from __future__ import annotations

import json
from collections.abc import Mapping

from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused

FIELD = "alora_invocation_tokens"
ONE_AT_A_TIME = "it acts from its invocation tokens on (aLoRA), and each row has one such position"

# Fields that PEFT refuses together with aLoRA, or whose effect begins at the first token: then the
# KV before the invocation would not be that of the base.
_CONFLICTS = (
    "bias",
    "layer_replication",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "velora_config",
)


def read_invocation(fields: Mapping[str, object]) -> tuple[int, ...]:
    """Return the invocation tokens of a config; empty: the adapter acts everywhere, as in PEFT."""
    value = fields.get(FIELD)
    if not value:
        return ()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise AdapterRefused(
            RefusalCode.WRONG_TYPE,
            f"{FIELD} must be a list of token ids, found {json.dumps(value)[:100]}.",
            fix="Write the ids of the tokenized invocation text into adapter_config.json.",
        )
    conflicts = [
        name for name in _CONFLICTS if fields.get(name) not in (None, False, "none", [], {})
    ]
    if fields.get("init_lora_weights") == "mica":
        conflicts.append("init_lora_weights='mica'")
    if conflicts:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_FIELD,
            f"{FIELD} cannot be combined with {', '.join(conflicts)}: only low-rank changes can "
            "begin at the invocation tokens.",
            fix="Train the adapter without one of them.",
        )
    return tuple(value)


def check_invocation(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuses invocation tokens that no prompt of the base can have."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"{FIELD} has the token id {outside[0]}, and the base has {vocab_size} tokens.",
            fix="Tokenize the invocation text with the tokenizer of this base.",
        )
