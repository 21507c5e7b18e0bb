"""The tokenizer of an adapter with tokenizer files of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loramux.engine.adapter_text.description import NAMED_TOKENS, Description
from loramux.engine.tokenizer import Tokenizer

Ask = Callable[[Mapping[str, Any]], list[int]]
"""Asks the adapter's process for the token ids of a request; raises InvalidRequest."""


class AdapterTokenizer:
    """Decodes with the decoder of the base, and lets another process render and encode.

    What the process says is data: templates and tokens that nothing here interprets.
    """

    def __init__(self, base: Tokenizer, description: Description, ask: Ask) -> None:
        self._base = base
        self._description = description
        self._ask = ask
        self._shares = description.shares_vocabulary
        self._special_ids = frozenset(description.special_ids)
        self._id_of = {token: number for number, token in description.added.items()}

    @property
    def vocab_size(self) -> int:
        return self._base.vocab_size if self._shares else self._description.num_tokens

    @property
    def is_byte_level(self) -> bool:
        return self._base.is_byte_level

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._shares:
            return self._base.encode(text, add_special_tokens=add_special_tokens)
        return self._ask({"texts": [text], "add_special_tokens": add_special_tokens})

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._shares:
            return self._base.encode_pair(first, second, add_special_tokens=add_special_tokens)
        return self._ask({"texts": [first, second], "add_special_tokens": add_special_tokens})

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        conversation, arguments = self._base.prepare_chat(
            messages,
            has_template=bool(self._description.templates),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        if self._shares and self._description.has_base_template:
            text = self._base.render(conversation, arguments)
            return self._base.encode(text, add_special_tokens=False)
        return self._ask({"conversation": conversation, "arguments": arguments})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._shares:
            return self._base.decode(token_ids, skip_special_tokens=skip_special_tokens)
        kept = (
            self._text(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special_ids)
        )
        return self._base.join([token for token in kept if token is not None])

    def token_bytes(self, token_id: int) -> bytes:
        token = self._text(token_id)
        return b"" if token is None else self._base.bytes_of(token)

    def token_to_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_skipped(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        if self._shares:
            return self._base.is_skipped(token_id, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self._text(token_id) is None

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text, special or not; None: there is none."""
        found = self._id_of.get(text)
        return self._base.added_token_id(text) if found is None else found

    def shares_vocabulary(self, other: object) -> bool:
        return self._shares and other is self._base

    def eos_ids_with(self, base_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*base_ids, *self._description.eos_token_ids)))

    def tokenizer_info(self) -> dict[str, Any]:
        """Return the special tokens and the chat template for clients that tokenize."""
        tokens = {name: self._description.tokens.get(name) for name in NAMED_TOKENS}
        return {**tokens, "chat_template": self._description.templates}

    def _text(self, token_id: int) -> str | None:
        found = self._description.added.get(token_id)
        return self._base.token_text(token_id) if found is None else found
