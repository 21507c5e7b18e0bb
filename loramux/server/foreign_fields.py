"""Fields of other servers' bodies that a route must not ignore, because an answer that ignored them
would look right and be wrong.

A route checks every field of the table that its own body does not have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.body import decode


@dataclass(frozen=True, slots=True)
class Foreign:
    """A field of another server."""

    harmless: tuple[Any, ...] = ()
    """Values that change nothing, and are accepted."""
    use: str = ""
    """What to send instead."""


_ADAPTER = Foreign(use="name the adapter in model")
_LENGTH = Foreign(use="send max_tokens")
_OFF = Foreign((False,))

FOREIGN_FIELDS: dict[str, Foreign] = {
    # Names of an adapter: the request must not run on the base instead.
    **dict.fromkeys(
        ("adapter", "adapter_id", "adapter_name", "adapter_source", "lora_dir", "lora_name"),
        _ADAPTER,
    ),
    **dict.fromkeys(("lora_path", "lora_request"), _ADAPTER),
    "lora": Foreign(([],), "name the adapters in model or adapters"),
    "merged_adapters": Foreign(use="send adapters, adapter_weights and combination"),
    # The form of the answer.
    "response_format": Foreign(({"type": "text"},)),
    **dict.fromkeys(
        ("ebnf", "format", "grammar", "json_schema", "regex", "structural_tag", "stop_regex"),
        Foreign(),
    ),
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
        Foreign(),
    ),
    "guided_whitespace_pattern": Foreign(),
    "tools": Foreign(([],)),
    "tool_choice": Foreign(("none",)),
    "functions": Foreign(([],)),
    "function_call": Foreign(("none",)),
    "modalities": Foreign((["text"],)),
    **dict.fromkeys(("audio", "documents", "prediction", "web_search_options"), Foreign()),
    # Lengths.
    "max_new_tokens": _LENGTH,
    "n_predict": _LENGTH,
    "min_new_tokens": Foreign((0,)),
    "min_tokens": Foreign((0,)),
    "ignore_eos_token": Foreign((False,), "send ignore_eos"),
    "truncate_prompt_tokens": Foreign(),
    # Sampling.
    "allowed_token_ids": Foreign(),
    "bad_words": Foreign(([],)),
    "best_of": Foreign(),
    "dry_multiplier": Foreign((0,)),
    "length_penalty": Foreign((1,)),
    "logits_processors": Foreign(([],)),
    "mirostat": Foreign((0,)),
    "repeat_penalty": Foreign((1,), "send repetition_penalty"),
    "thinking_token_budget": Foreign(),
    "typical_p": Foreign((1,)),
    "use_beam_search": _OFF,
    "watermark": _OFF,
    # Prompts.
    "add_special_tokens": _OFF,
    "chat_template": Foreign(),
    "echo": _OFF,
    "mm_processor_kwargs": Foreign(({},)),
    "prompt_embeds": Foreign(),
    "reasoning_effort": Foreign(("none",)),
    "session_params": Foreign(),
    "suffix": Foreign(("",)),
    # What is reported, and when it is computed.
    "include_reasoning": Foreign((True,)),
    "logprob_token_ids": Foreign(([],)),
    "priority": Foreign((0,)),
    "prompt_logprobs": Foreign(),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
}


class UnsupportedFields:
    """The fields of the table that are not fields of a route's body."""

    def __init__(self, body: type[msgspec.Struct], *, also_known: Collection[str] = ()) -> None:
        own = {field.encode_name for field in msgspec.structs.fields(body)} | set(also_known)
        self._foreign = {name: one for name, one in FOREIGN_FIELDS.items() if name not in own}
        self._struct = msgspec.defstruct(
            "Unsupported", [(name, Any, None) for name in self._foreign]
        )

    def check(self, raw: bytes, *, num_choices: int = 1) -> None:
        """Raise InvalidRequest for the first such field of the body."""
        given = decode(raw, self._struct)
        for name, foreign in self._foreign.items():
            value = getattr(given, name)
            is_num_choices = name == "best_of" and value == num_choices
            if value is not None and value not in foreign.harmless and not is_num_choices:
                raise InvalidRequest(
                    f"{name} is not supported by this route: {foreign.use or 'leave it out'}.",
                    param=name,
                )


@cache
def unsupported_in(body: type[msgspec.Struct]) -> UnsupportedFields:
    return UnsupportedFields(body)
