"""The tokenizers of adapters that have tokenizer files of their own.

A tokenizer is parsed once for all adapters with the same files, and not at all if it has the
vocabulary of the base. It must extend that vocabulary, because the weights were trained on its ids.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loramux.adapters.peft.folder import open_folder
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.tokenizer_files import (
    ADDED_NAME,
    GENERATION_NAME,
    SETTINGS_NAME,
    SPECIAL_NAME,
    TEMPLATE_NAME,
    VOCABULARY_NAME,
    digest_of_contents,
    read_tokenizer_files,
)
from loramux.engine.adapter_template import AdapterTemplate
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import AdapterRefused
from loramux.types.adapter import AdapterCard

MAX_KEPT = 8
"""Parsed tokenizers that are kept; one with 150,000 tokens takes about 100 MB."""
_FIX = (
    "Save the tokenizer that the adapter was trained with again, or remove its files from the "
    "folder to use that of the base."
)
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
# Settings that do not change the ids of a text, nor the text of ids.
_NEUTRAL_SETTINGS = frozenset(
    {
        *_TOKEN_NAMES,
        "mask_token",
        "additional_special_tokens",
        "extra_special_tokens",
        "model_specific_special_tokens",
        "added_tokens_decoder",
        "chat_template",
        "clean_up_tokenization_spaces",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "truncation_side",
        "tokenizer_class",
        "processor_class",
        "auto_map",
        "backend",
        "is_local",
        "local_files_only",
        "errors",
        "max_length",
        "stride",
        "truncation_strategy",
        "pad_to_multiple_of",
        "pad_token_type_id",
    }
)
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Key:
    digest: str
    vocab_size: int


class AdapterTokenizers:
    """Finds the tokenizer of an adapter; any thread may call it."""

    def __init__(self, base: Tokenizer, base_folder: Path, *, vocab_size: int) -> None:
        """`vocab_size`: rows of the base's embedding."""
        self._base = base
        self._base_folder = base_folder
        self._vocab_size = vocab_size
        self._base_files: dict[str, bytes] | None = None
        self._kept: OrderedDict[_Key, Tokenizer | AdapterRefused] = OrderedDict()
        self._lock = threading.Lock()
        # Parsing takes hundreds of milliseconds and megabytes: one at a time.
        self._making = threading.Lock()

    def find(self, cards: Sequence[AdapterCard]) -> Tokenizer | None:
        """Returns the tokenizer of a selection if nothing has to be read for it, else None."""
        card = _deciding(cards)
        return self._base if card is None else self._find(self._key(card))

    def read(self, cards: Sequence[AdapterCard]) -> Tokenizer:
        """Returns the tokenizer of a selection; reads it before its first use.

        That of an adapter is used if it is alone, or if all adapters of a sum have the same files.
        Raises AdapterRefused.
        """
        card = _deciding(cards)
        if card is None:
            return self._base
        key = self._key(card)
        with self._making:
            found = self._find(key)
            if found is not None:
                return found
            try:
                made = self._make(card, key.vocab_size)
            except AdapterRefused as error:
                if error.code in (RefusalCode.BROKEN_TOKENIZER, RefusalCode.FOREIGN_TOKENIZER):
                    self._keep(key, error)
                raise
            self._keep(key, made)
        return made

    def _key(self, card: AdapterCard) -> _Key:
        return _Key(card.tokenizer_digest, card.vocab_size or self._vocab_size)

    def _find(self, key: _Key) -> Tokenizer | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if isinstance(found, AdapterRefused):
            raise AdapterRefused(found.code, found.reason, fix=found.fix)
        return found

    def _keep(self, key: _Key, made: Tokenizer | AdapterRefused) -> None:
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def _make(self, card: AdapterCard, vocab_size: int) -> Tokenizer:
        own = read_tokenizer_files(open_folder(Path(card.path)))
        if digest_of_contents(own) != card.tokenizer_digest:
            raise AdapterRefused(
                "changed_on_disk",
                f"The tokenizer files of {card.path} were replaced.",
                fix="Send the request again to use the new files.",
            )
        if self._base_files is None:
            self._base_files = read_tokenizer_files(self._base_folder.resolve())
        base = self._base_files
        settings = _decode_object(own, SETTINGS_NAME)
        texts = _templates(own, settings)
        special = _special_tokens(own, settings)
        if self._shares_vocabulary(base, own, settings, special):
            made = self._base
        else:
            made = _parse(base, own, settings, self._base_folder)
            _check_extends(self._base, made, vocab_size)
        if texts is None:
            texts = self._base.chat_template
        eos_ids = _eos_ids(made, own, settings, special)
        tokens = {**made.special_tokens, **special}
        # pad_token and others may differ, and change no answer unless the template uses them.
        is_same = texts == self._base.chat_template and _same_for(texts, tokens, self._base)
        if made is self._base and is_same and eos_ids <= _eos_ids(made, base, {}, {}):
            return self._base
        own_eos_ids = tuple(sorted(number for number in eos_ids if number < vocab_size))
        return made.for_adapter(AdapterTemplate(texts, tokens), own_eos_ids)

    def _shares_vocabulary(
        self,
        base: Mapping[str, bytes],
        own: Mapping[str, bytes],
        settings: Settings,
        special: Mapping[str, str],
    ) -> bool:
        """Whether the adapter's files give the base's ids to every text."""
        if not _same_vocabulary(base.get(VOCABULARY_NAME), own):
            return False
        if SETTINGS_NAME in own:
            base_settings = _decode_object(base, SETTINGS_NAME)
            names = (settings.keys() | base_settings.keys()) - _NEUTRAL_SETTINGS
            if any(settings.get(name) != base_settings.get(name) for name in names):
                return False
        added = {**_decode_object(own, ADDED_NAME), **_added_tokens(settings)}
        if any(self._base.token_id(token) != number for token, number in added.items()):
            return False
        named = [*special.values(), *_listed_tokens(own, settings)]
        return all(self._base.token_id(token) in self._base.special_ids for token in named)


def _deciding(cards: Sequence[AdapterCard]) -> AdapterCard | None:
    """Returns an adapter whose tokenizer files answer the selection; None: those of the base."""
    digests = {card.tokenizer_digest for card in cards}
    return cards[0] if len(digests) == 1 and "" not in digests else None


def _same_vocabulary(base: bytes | None, own: Mapping[str, bytes]) -> bool:
    content = own.get(VOCABULARY_NAME)
    if content is None or content == base:
        return True
    if base is None:
        return False
    return _effective(_decode(content, VOCABULARY_NAME)) == _effective(
        _decode(base, VOCABULARY_NAME)
    )


def _effective(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns tokenizer.json without what trainers change in it and has no effect here."""
    kept = {**fields, "padding": None, "truncation": None}
    processor = kept.get("post_processor")
    if isinstance(processor, dict) and processor.get("type") == "TemplateProcessing":
        single = processor.get("single")
        if single == [{"Sequence": {"id": "A", "type_id": 0}}]:
            kept["post_processor"] = None
    return kept


def _parse(
    base: Mapping[str, bytes], own: Mapping[str, bytes], settings: Settings, base_folder: Path
) -> Tokenizer:
    files = dict(own)
    if VOCABULARY_NAME not in own:
        if VOCABULARY_NAME not in base:
            raise _broken(f"The folder has no {VOCABULARY_NAME}, and neither has that of the base.")
        files[VOCABULARY_NAME] = base[VOCABULARY_NAME]
    if SETTINGS_NAME not in own:
        files.setdefault(SPECIAL_NAME, base.get(SPECIAL_NAME, b"{}"))
        settings = _decode_object(base, SETTINGS_NAME)
    # Settings may not name files of this machine, and templates are kept apart.
    kept = {
        name: value
        for name, value in settings.items()
        if not name.endswith("_file") and name not in ("auto_map", "chat_template", "name_or_path")
    }
    files[SETTINGS_NAME] = json.dumps(kept).encode()
    files.pop(TEMPLATE_NAME, None)
    files.pop(GENERATION_NAME, None)
    with TemporaryDirectory(prefix="loramux-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        model_config = base_folder / "config.json"
        if model_config.is_file():
            (Path(folder) / "config.json").write_bytes(model_config.read_bytes())
        try:
            return Tokenizer(folder)
        except BaseException as error:
            # The parser is not Python, and its panics are no Exceptions.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            detail = str(error).replace(folder, "the folder")[:300]
            raise _broken(f"The tokenizer files cannot be parsed: {detail}") from error


def _check_extends(base: Tokenizer, own: Tokenizer, vocab_size: int) -> None:
    ids, own_ids = base.vocabulary(), own.vocabulary()
    moved = [token for token, number in ids.items() if own_ids.get(token) != number]
    if moved:
        raise _foreign(
            f"It gives other ids to {len(moved)} of the {len(ids)} tokens of this base, or lacks "
            f"them: {name_some([repr(token)[:40] for token in moved])}."
        )
    taken = set(ids.values())
    # Trainers add a token to pad with, which is in no prompt and needs no row of the embedding.
    pad = own.special_tokens.get("pad_token")
    beyond = []
    for token in own_ids.keys() - ids.keys():
        if own_ids[token] in taken:
            raise _foreign(f"Its token {token[:40]!r} has the id of another token of this base.")
        if own_ids[token] >= vocab_size and token != pad:
            beyond.append(token)
    if beyond:
        raise _foreign(
            f"The adapter has {vocab_size} embeddings, and its tokenizer has more tokens: "
            f"{name_some(sorted(repr(token)[:40] for token in beyond))}."
        )


def _eos_ids(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    settings: Settings,
    special: Mapping[str, str],
) -> frozenset[int]:
    """Returns the ids by eos_token, and by eos_token_id of the generation config."""
    named = special.get("eos_token", tokenizer.special_tokens.get("eos_token"))
    found = None if named is None else tokenizer.token_id(named)
    ids = set() if found is None else {found}
    listed = _decode_object(files, GENERATION_NAME).get("eos_token_id")
    for number in listed if isinstance(listed, list) else [listed]:
        if number is None:
            continue
        if type(number) is not int or number < 0:
            raise _broken(f"eos_token_id of {GENERATION_NAME} is not a token id.")
        ids.add(number)
    return frozenset(ids)


def _templates(own: Mapping[str, bytes], settings: Settings) -> Any:
    """Returns the template, or templates by name; None: the adapter has none."""
    if TEMPLATE_NAME in own:
        try:
            return own[TEMPLATE_NAME].decode()
        except UnicodeDecodeError as error:
            raise _broken(f"{TEMPLATE_NAME} is not UTF-8.") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise _broken(
                f"chat_template of {SETTINGS_NAME} is not a list of templates."
            ) from error
    texts = list(found.values()) if isinstance(found, dict) else [found]
    if found is not None and not all(isinstance(text, str) for text in texts):
        raise _broken(f"chat_template of {SETTINGS_NAME} is not text.")
    return found or None


def _same_for(texts: object, tokens: Mapping[str, str], base: Tokenizer) -> bool:
    """Whether the templates see the named special tokens that those of the base see."""
    parts = [str(text) for text in (texts.values() if isinstance(texts, dict) else [texts])]
    used = [name for name in (*_TOKEN_NAMES, "mask_token") if any(name in part for part in parts)]
    return all(tokens.get(name) == base.special_tokens.get(name) for name in used)


def _special_tokens(own: Mapping[str, bytes], settings: Settings) -> dict[str, str]:
    """Returns the special tokens that the files name, by their names."""
    listed = _decode_object(own, SPECIAL_NAME)
    found = {}
    for name in (*_TOKEN_NAMES, "mask_token"):
        value = settings.get(name, listed.get(name))
        if value is None:
            continue
        found[name] = _token_text(value, name)
    return found


def _listed_tokens(own: Mapping[str, bytes], settings: Settings) -> list[str]:
    tokens: list[str] = []
    for fields in (settings, _decode_object(own, SPECIAL_NAME)):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            values = fields.get(name) or []
            values = list(values.values()) if isinstance(values, dict) else values
            if not isinstance(values, list):
                raise _broken(f"{name} is not a list.")
            tokens += [_token_text(value, name) for value in values]
    return tokens


def _added_tokens(settings: Settings) -> dict[str, int]:
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise _broken("added_tokens_decoder is not an object.")
    try:
        return {_token_text(value, "a token"): int(number) for number, value in listed.items()}
    except ValueError as error:
        raise _broken("added_tokens_decoder has a key that is not a token id.") from error


def _token_text(value: object, name: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise _broken(f"{name[:40]} is not a token.")
    return text


def _decode_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return _decode(files[name], name) if name in files else {}


def _decode(content: bytes, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _broken(f"{name} is not JSON: {str(error)[:200]}.") from error
    if not isinstance(fields, dict):
        raise _broken(f"{name} is not a JSON object.")
    return fields


def _broken(message: str) -> AdapterRefused:
    return AdapterRefused(RefusalCode.BROKEN_TOKENIZER, message, fix=_FIX)


def _foreign(message: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.FOREIGN_TOKENIZER,
        f"The adapter's tokenizer does not fit this base. {message}",
        fix=_FIX,
    )
