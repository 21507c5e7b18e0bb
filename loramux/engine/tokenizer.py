"""Text to tokens and back, from the tokenizer files that lie beside a model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loramux.engine.chat import normalize_messages
from loramux.errors import InvalidRequest, UnsupportedModel

TEMPLATE_ARGUMENTS = frozenset({"documents", "continue_final_message"})
"""Arguments of transformers' own that a request may set; its other ones are ours."""


class Tokenizer:
    """Safe to share between threads: nothing in it changes after it was made."""

    def __init__(self, folder: str | Path) -> None:
        self._outer = _load(Path(folder))
        self._inner = self._outer.backend_tokenizer
        self._inner.no_truncation()
        self._inner.no_padding()
        added = self._inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_of = _byte_alphabet() if _is_byte_level(self._inner) else {}
        self.eos_token_ids = _eos_token_ids(Path(folder), self._outer.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """With added tokens; a model may have more rows than this, to pad its embedding."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def is_byte_level(self) -> bool:
        """Whether text is the UTF-8 of the tokens' bytes, one after the other."""
        return bool(self._byte_of)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._outer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            encoding = self._inner.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequest(
                "The prompt is not valid Unicode: it holds half of a surrogate pair. "
                "Send whole characters."
            ) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template, so it cannot take messages: use the completions "
                "route, or add a chat_template to its tokenizer_config.json.",
                param="messages",
            )
        arguments = dict(chat_template_kwargs or {})
        self._refuse_own_arguments(arguments)
        conversation = normalize_messages(messages)
        arguments.setdefault("continue_final_message", False)
        if arguments["continue_final_message"]:
            add_generation_prompt = False
        arguments |= {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return self.encode(self._render(conversation, arguments), add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; part of a character, maybe. Empty for an unknown id."""
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of:
            # Added tokens are plain text, and may hold characters outside the alphabet.
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return str(token).encode()
        if (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes.fromhex(byte[1])
        return str(token).replace("▁", " ").encode()

    def token_to_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary spells them; empty for an unknown id."""
        return [self._inner.id_to_token(token_id) or "" for token_id in token_ids]

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients such as lm-eval ask for before they tokenize by themselves."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: getattr(self._outer, name) for name in names}
        return {**tokens, "chat_template": self._outer.chat_template}

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decode() passes over the token."""
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self._inner.id_to_token(token_id) is None

    def _refuse_own_arguments(self, arguments: Mapping[str, Any]) -> None:
        own = inspect.signature(self._outer.apply_chat_template).parameters.keys()
        refused = sorted((arguments.keys() & own) - TEMPLATE_ARGUMENTS)
        if refused:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(refused)}: "
                "it is for what the model's chat template itself reads.",
                param="chat_template_kwargs",
            )

    def _render(self, conversation: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._outer.apply_chat_template(conversation, tokenize=False, **arguments))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"The chat template of this model refused the messages: {error}", param="messages"
            ) from error


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise UnsupportedModel(f"No folder {folder}: give one with the model's tokenizer.json.")
    try:
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModel(
            f"Cannot load a tokenizer from {folder}: {error} "
            "Put the model's tokenizer.json and tokenizer_config.json there."
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"{folder} has only a slow {type(tokenizer).__name__}: "
            "convert it to a tokenizer.json with transformers' save_pretrained."
        )
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """A tokenizer.json is complete in itself; only without one must transformers choose a class.

    The choice imports torch: 7.7 s and 392 MB against 2.2 s and 118 MB for the plain class.
    """
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_byte_level(tokenizer: Any) -> bool:
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.decoder, ByteLevel)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 as itself and the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


def _eos_token_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """Those of the generation config, else of the model's config; and the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        found = _read_eos(folder / name)
        if found:
            break
    else:
        found = []
    if own is not None:
        found.append(own)
    return tuple(dict.fromkeys(found))


def _read_eos(path: Path) -> list[int]:
    if not path.is_file():
        return []
    config = json.loads(path.read_text(encoding="utf-8"))
    text_config = config.get("text_config") or {}
    value = config.get("eos_token_id", text_config.get("eos_token_id"))
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(token_id) for token_id in value]
