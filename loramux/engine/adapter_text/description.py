"""What the tokenizer files of an adapter say, as the process that reads them describes it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""The special tokens of which clients are told."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between an adapter's tokenizer and that of the base."""

    is_base: bool = False
    """There are none; all other fields are empty."""
    shares_vocabulary: bool = True
    """Every text has the ids that it has in the base."""
    templates: str | dict[str, str] | None = None
    """One chat template, or templates by name, of which tool_use is for requests with tools."""
    has_base_template: bool = False
    """The templates, and the tokens that they use, are those of the base."""
    tokens: dict[str, str] = {}
    """The special tokens that its templates may name, such as eos_token."""
    eos_token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    """Tokens of the vocabulary, added ones included; 0 if it is the base's."""
    added: dict[int, str] = {}
    """The tokens that the base does not have, by their ids."""
    special_ids: tuple[int, ...] = ()
    """The special tokens of a vocabulary of its own."""


def choose_template(templates: str | Mapping[str, str] | None, *, has_tools: bool) -> str:
    """Return the template for a request; raise ValueError if there is none for it."""
    if isinstance(templates, str):
        return templates
    texts = templates or {}
    chosen = texts.get("tool_use") if has_tools else None
    chosen = texts.get("default") if chosen is None else chosen
    if chosen is None:
        raise ValueError("it has no template with the name 'default'")
    return chosen
