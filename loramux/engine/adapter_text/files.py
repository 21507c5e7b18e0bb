"""Reads the tokenizer files of an adapter. Only processes with limits do this.

A tokenizer is not parsed if it has the vocabulary of the base. Otherwise it must extend that
vocabulary, because the weights were trained on its ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loramux.adapters.peft.folder import open_folder, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.tokenizer_files import (
    ADDED_NAME,
    GENERATION_NAME,
    MAX_BYTES,
    SETTINGS_NAME,
    SPECIAL_NAME,
    TEMPLATE_NAME,
    VOCABULARY_NAME,
    digest_of_contents,
    find_tokenizer_files,
    read_tokenizer_files,
)
from loramux.engine.adapter_text.description import NAMED_TOKENS, Description
from loramux.engine.adapter_text.limits import (
    MAX_ADDED_TOKENS,
    MAX_SETTINGS,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
    MIB,
    TIMES_BASE,
)
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import AdapterRefused

_MAX_ID = 2**31
# Tokens that are decoded together where two decoders are compared.
_RUN = 64
_FIX = (
    "Save the tokenizer that the adapter was trained with again, or remove its files from the "
    "folder to use that of the base."
)
_TOKEN_NAMES = (*NAMED_TOKENS, "sep_token", "cls_token")
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


class Base:
    """The tokenizer of the base model, with which those of adapters are compared."""

    def __init__(self, folder: Path, chat_template: str | None) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer(folder, chat_template=chat_template)
        self.files = read_tokenizer_files(folder.resolve())

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))


def check_sizes(folder: Path, base: Base) -> int:
    """Return the size of an adapter's tokenizer files; raise AdapterRefused if it is absurd."""
    with refusing_os_errors(folder):
        sizes = {
            name: path.stat().st_size
            for name, path in find_tokenizer_files(open_folder(folder)).items()
        }
    for name, size in sizes.items():
        if size > MAX_BYTES[name]:
            raise _too_large(f"{name} is larger than {MAX_BYTES[name]} bytes.")
    own, known = sizes.get(VOCABULARY_NAME, 0), len(base.files.get(VOCABULARY_NAME, b""))
    if known and own > TIMES_BASE * known + 4 * MIB:
        raise _too_large(
            f"{VOCABULARY_NAME} has {own} bytes, which no extension of that of the base needs, "
            f"which has {known}."
        )
    return sum(sizes.values())


def read_adapter(
    folder: Path, digest: str, vocab_size: int, base: Base
) -> tuple[Description, Tokenizer]:
    """Return what the files of an adapter say, and the tokenizer for its texts.

    `digest`: of the files as they were when the adapter was registered; `vocab_size`: rows of its
    embedding. Raises AdapterRefused.
    """
    own = read_tokenizer_files(open_folder(folder))
    if digest_of_contents(own) != digest:
        raise AdapterRefused(
            "changed_on_disk",
            f"The tokenizer files of {folder} were replaced.",
            fix="Send the request again to use the new files.",
        )
    settings = _decode_object(own, SETTINGS_NAME)
    if len(settings) > MAX_SETTINGS:
        raise _too_large(f"{SETTINGS_NAME} has {len(settings)} fields; {MAX_SETTINGS} are allowed.")
    templates = _templates(own, settings)
    special = _special_tokens(own, settings)
    made = base.tokenizer
    if not _shares_vocabulary(base, own, settings, special):
        made = _parse(base, own, settings)
        _check_extends(base.tokenizer, made, vocab_size)
    if templates is None:
        templates = base.tokenizer.chat_template
    return _describe(base, made, templates, own, settings, special, vocab_size), made


def _describe(  # noqa: PLR0913, PLR0917  (the parts of one folder)
    base: Base,
    made: Tokenizer,
    templates: Any,
    own: Mapping[str, bytes],
    settings: Settings,
    special: Mapping[str, str],
    vocab_size: int,
) -> Description:
    eos_ids = _eos_ids(made, own, settings, special)
    tokens = {**made.special_tokens, **special}
    shares = made is base.tokenizer
    # pad_token and others may differ, and change no answer unless the template uses them.
    is_same = templates == made.chat_template and _same_for(templates, tokens, base.tokenizer)
    if shares and is_same and eos_ids <= _eos_ids(made, base.files, {}, {}):
        return Description(is_base=True)
    base_ids = {} if shares else base.tokenizer.vocabulary()
    own_ids = {} if shares else made.vocabulary()
    return Description(
        shares_vocabulary=shares,
        templates=templates,
        has_base_template=is_same,
        tokens=tokens,
        eos_token_ids=tuple(sorted(number for number in eos_ids if number < vocab_size)),
        num_tokens=0 if shares else made.vocab_size,
        added={own_ids[token]: token for token in own_ids.keys() - base_ids.keys()},
        special_ids=() if shares else tuple(sorted(made.special_ids)),
    )


def _shares_vocabulary(
    base: Base, own: Mapping[str, bytes], settings: Settings, special: Mapping[str, str]
) -> bool:
    """Whether the adapter's files give the base's ids to every text."""
    if not _same_vocabulary(base.files.get(VOCABULARY_NAME), own):
        return False
    if SETTINGS_NAME in own:
        base_settings = _decode_object(base.files, SETTINGS_NAME)
        names = (settings.keys() | base_settings.keys()) - _NEUTRAL_SETTINGS
        if any(settings.get(name) != base_settings.get(name) for name in names):
            return False
    known = base.tokenizer
    added = {**_decode_object(own, ADDED_NAME), **_added_tokens(settings)}
    if any(known.token_id(token) != number for token, number in added.items()):
        return False
    named = [*special.values(), *_listed_tokens(own, settings)]
    return all(known.token_id(token) in known.special_ids for token in named)


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
    """Return tokenizer.json without what trainers change in it and has no effect here."""
    kept = {**fields, "padding": None, "truncation": None}
    processor = kept.get("post_processor")
    if isinstance(processor, dict) and processor.get("type") == "TemplateProcessing":
        single = processor.get("single")
        if single == [{"Sequence": {"id": "A", "type_id": 0}}]:
            kept["post_processor"] = None
    return kept


def _parse(base: Base, own: Mapping[str, bytes], settings: Settings) -> Tokenizer:
    files = dict(own)
    if VOCABULARY_NAME not in own:
        if VOCABULARY_NAME not in base.files:
            raise _broken(f"The folder has no {VOCABULARY_NAME}, and neither has that of the base.")
        files[VOCABULARY_NAME] = base.files[VOCABULARY_NAME]
    if SETTINGS_NAME not in own:
        files.setdefault(SPECIAL_NAME, base.files.get(SPECIAL_NAME, b"{}"))
        settings = _decode_object(base.files, SETTINGS_NAME)
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
        model_config = base.folder / "config.json"
        if model_config.is_file():
            (Path(folder) / "config.json").write_bytes(model_config.read_bytes())
        try:
            return Tokenizer(folder)
        except BaseException as error:
            # The parser is not Python, and its panics are no Exceptions.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if isinstance(error, MemoryError):
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
    _check_added(base, own, own_ids.keys() - ids.keys())


def _check_added(base: Tokenizer, own: Tokenizer, added: Set[str]) -> None:
    if len(added) > MAX_ADDED_TOKENS:
        raise _too_large(
            f"It adds {len(added)} tokens to those of the base; {MAX_ADDED_TOKENS} are allowed."
        )
    longest = max(map(len, added), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise _too_large(
            f"It adds a token of {longest} characters; {MAX_TOKEN_CHARACTERS} are allowed."
        )
    if not _decodes_alike(base, own):
        raise _foreign("It makes other text of the tokens of this base.")


def _decodes_alike(base: Tokenizer, own: Tokenizer) -> bool:
    """Whether the tokens of the base have one text in both; answers are decoded as the base's."""
    tokens = sorted(base.vocabulary())
    runs = (tokens[start : start + _RUN] for start in range(0, len(tokens), _RUN))
    return all(base.join(run) == own.join(run) for run in runs)


def _eos_ids(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    settings: Settings,
    special: Mapping[str, str],
) -> frozenset[int]:
    """Return the ids by eos_token, and by eos_token_id of the generation config."""
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
    """Return the template, or templates by name; None: the adapter has none."""
    found = _find_templates(own, settings)
    texts = found.items() if isinstance(found, dict) else [("", found or "")]
    total = sum(len(name) + len(text) for name, text in texts)
    if total > MAX_TEMPLATE_CHARACTERS:
        raise _too_large(
            f"Its chat templates have {total} characters; {MAX_TEMPLATE_CHARACTERS} are allowed."
        )
    return found


def _find_templates(own: Mapping[str, bytes], settings: Settings) -> Any:
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
    texts = [*found, *found.values()] if isinstance(found, dict) else [found]
    if found is not None and not all(isinstance(text, str) for text in texts):
        raise _broken(f"chat_template of {SETTINGS_NAME} is not text.")
    return found or None


def _same_for(texts: object, tokens: Mapping[str, str], base: Tokenizer) -> bool:
    """Whether the templates see the named special tokens that those of the base see."""
    parts = [str(text) for text in (texts.values() if isinstance(texts, dict) else [texts])]
    used = [name for name in (*_TOKEN_NAMES, "mask_token") if any(name in part for part in parts)]
    return all(tokens.get(name) == base.special_tokens.get(name) for name in used)


def _special_tokens(own: Mapping[str, bytes], settings: Settings) -> dict[str, str]:
    """Return the special tokens that the files name, by their names."""
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
        found = {_token_text(value, "a token"): int(number) for number, value in listed.items()}
        if not all(0 <= number < _MAX_ID for number in found.values()):
            raise ValueError("an id is negative or too large")
        return found
    except ValueError as error:
        raise _broken("added_tokens_decoder has a key that is not a token id.") from error


def _token_text(value: object, name: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise _broken(f"{name[:40]} is not a token.")
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise _too_large(
            f"{name[:40]} has {len(text)} characters; {MAX_TOKEN_CHARACTERS} are allowed."
        )
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


def _too_large(message: str) -> AdapterRefused:
    return AdapterRefused(RefusalCode.TOKENIZER_TOO_LARGE, message, fix=_FIX)
