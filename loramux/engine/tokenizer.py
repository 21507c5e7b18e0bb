"""Encodes and decodes text with the tokenizer files of a model."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loramux.engine.chat import normalize_messages
from loramux.errors import InvalidRequest, UnsupportedModel

TEMPLATE_ARGUMENTS = frozenset({"documents", "continue_final_message"})
"""Arguments of transformers' apply_chat_template that a request may set."""
_INLINE_CHARACTERS = 1024
# Two threads that import parts of transformers at once may each find the other's half done: Python
# hands out unfinished modules rather than let threads wait for each other in a circle.
_importing = threading.Lock()


class Tokenizer:
    """A tokenizer that threads may share: it is immutable after construction."""

    def __init__(self, folder: str | Path, *, chat_template: str | None = None) -> None:
        """`chat_template`: replaces that of the folder."""
        self._outer = _load(Path(folder))
        if chat_template is not None:
            self._outer.chat_template = chat_template
        self._inner = self._outer.backend_tokenizer
        self._inner.no_truncation()
        self._inner.no_padding()
        added = self._inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        self._byte_of = _byte_alphabet() if _is_byte_level(self._inner) else {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the embedding of a model may have more rows."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def is_byte_level(self) -> bool:
        """Whether the text is the UTF-8 decoding of the tokens' concatenated bytes."""
        return bool(self._byte_of)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._outer.chat_template)

    @property
    def chat_template(self) -> object:
        """The text of the template, or texts by name."""
        return self._outer.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens, such as eos_token."""
        return dict(self._outer.special_tokens_map)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones included."""
        return dict(self._inner.get_vocab(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def eos_ids_with(self, base_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the end-of-sequence ids of the base: it has no others."""
        return tuple(dict.fromkeys(base_ids))

    def shares_vocabulary(self, other: object) -> bool:
        """Return whether the other tokenizer gives the same ids to every text."""
        return self is other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, len(text), add_special_tokens)

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode two texts as one input, as the tokenizer joins them."""
        return self._encode((first, second), len(first) + len(second), add_special_tokens)

    def _encode(
        self, text: str | tuple[str, str], num_characters: int, add_special_tokens: bool
    ) -> list[int]:
        try:
            if num_characters <= _INLINE_CHARACTERS:
                texts = (text,) if isinstance(text, str) else text
                encoding = self._inner.encode(*texts, add_special_tokens=add_special_tokens)
            else:
                # The library lets other threads run only while it encodes a batch.
                [encoding] = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequest(
                "The prompt is not valid Unicode: it holds half of a surrogate pair. "
                "Send whole characters."
            ) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= _INLINE_CHARACTERS:
            return str(self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens))
        [text] = self._inner.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        conversation, arguments = self.prepare_chat(
            messages,
            has_template=self.has_chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(self.render(conversation, arguments), add_special_tokens=False)

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        has_template: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and the other arguments of a template; raise InvalidRequest."""
        if not has_template:
            raise InvalidRequest(
                "This model has no chat template, so it cannot take messages: use the completions "
                "route, or add a chat_template to its tokenizer_config.json.",
                param="messages",
            )
        arguments = dict(chat_template_kwargs or {})
        self._refuse_reserved_arguments(arguments)
        conversation = normalize_messages(messages)
        arguments.setdefault("continue_final_message", False)
        if arguments["continue_final_message"]:
            add_generation_prompt = False
        arguments |= {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return conversation, arguments

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text, possibly a part of a character.

        The result is empty for an unknown id.
        """
        token = self.token_text(token_id)
        return b"" if token is None else self.bytes_of(token)

    def token_text(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it, or None for an unknown id."""
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token of this vocabulary or of one that extends it."""
        if self._byte_of:
            # Added tokens are plain text and may contain characters outside the alphabet.
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return token.encode()
        if (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def join(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens as decode() does, also of tokens that extend this one's."""
        decoder = self._inner.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text, special or not; None: there is none."""
        return self._added_ids.get(text)

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return str(self._inner.to_str())

    def token_to_str(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def tokenizer_info(self) -> dict[str, Any]:
        """Return the special tokens and the chat template for clients that tokenize."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: getattr(self._outer, name) for name in names}
        return {**tokens, "chat_template": self.chat_template}

    def is_skipped(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decode() leaves the token out."""
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self._inner.id_to_token(token_id) is None

    def _refuse_reserved_arguments(self, arguments: Mapping[str, Any]) -> None:
        reserved = inspect.signature(self._outer.apply_chat_template).parameters.keys()
        refused = sorted((arguments.keys() & reserved) - TEMPLATE_ARGUMENTS)
        if refused:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(refused)}: "
                "it is for variables of the model's chat template.",
                param="chat_template_kwargs",
            )

    def render(
        self,
        conversation: list[dict[str, Any]],
        arguments: dict[str, Any],
        *,
        choose: Callable[[], str] | None = None,
    ) -> str:
        """Render the chat template, or the one that `choose` returns, which may fail in any way.

        Raises InvalidRequest.
        """
        from jinja2 import TemplateError

        expected: tuple[type[Exception], ...] = (TemplateError, TypeError, ValueError, KeyError)
        if choose is not None:
            expected = (Exception,)
        try:
            other = {} if choose is None else {"chat_template": choose()}
            text = self._outer.apply_chat_template(
                conversation, tokenize=False, **other, **arguments
            )
        except MemoryError:
            raise
        except expected as error:
            # An error of the system names paths of this machine.
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InvalidRequest(
                f"The chat template of this model refused the messages: {str(reason)[:1000]}",
                param="messages",
            ) from error
        return str(text)


def import_library() -> None:
    """Import the tokenizer library ahead of the first tokenizer."""
    with contextlib.suppress(ImportError), _importing:  # reported when a tokenizer is loaded
        from transformers import PreTrainedTokenizerFast  # noqa: F401


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
    """Return the plain fast class where there is a tokenizer.json, which needs no other files.

    AutoTokenizer imports torch: 7.7 s and 392 MB instead of 2.2 s and 118 MB.
    """
    with _importing:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


def _is_byte_level(tokenizer: Any) -> bool:
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.decoder, ByteLevel)


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes.

    Printable Latin-1 stands for itself, and the other bytes are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
