"""Single values of the serve settings, as a flag or a TOML file gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec

from loramux.config.engine import parse_bytes
from loramux.errors import InvalidRequest

NONE = "none"


class Kind(Enum):
    TEXT = auto()
    TEXTS = auto()
    PATH = auto()
    PATHS = auto()
    URL_OR_PATH = auto()
    COUNT = auto()
    SECONDS = auto()
    SWITCH = auto()
    SIZE = auto()
    SHARE = auto()
    WEIGHTS = auto()
    LORA_MODULES = auto()


def setting(  # noqa: PLR0913  (what a flag, a key and a line of help need)
    default: object,
    kind: Kind,
    group: str,
    text: str,
    *,
    metavar: str | None = None,
    is_secret: bool = False,
) -> Any:
    """A secret one may hold a password, and is left out where the settings are shown."""
    metadata = {"kind": kind, "group": group, "help": text, "metavar": metavar}
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to serve from the start."""

    name: str
    path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        for part in ("name", "path"):
            if not getattr(self, part):
                raise InvalidRequest(
                    f"An adapter has no {part}. Write name=folder.", param="lora_modules"
                )


FIELDS = ("name", "path", "base_model_name")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Sequence[str]) -> str:
    """A sentence that names what may have been meant."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known are: {', '.join(known)}."


def parse_lora_module(text: str, folder: Path | None = None) -> LoraModule:
    """name=path, or vLLM's JSON form."""
    if text.lstrip().startswith("{"):
        try:
            fields = msgspec.json.decode(text.encode(errors="surrogateescape"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{text!r} is not valid JSON: {error}.") from error
        return lora_module_from_fields(fields, folder)
    name, separator, path = text.partition("=")
    if not separator or not name.strip() or not path.strip():
        raise InvalidRequest(
            f"{text!r} does not name an adapter. Write name=folder, for example "
            "pirate=examples/adapters/pirate."
        )
    return LoraModule(name.strip(), located(path.strip(), folder))


def lora_module_from_fields(fields: object, folder: Path | None) -> LoraModule:
    if not isinstance(fields, Mapping):
        raise wrong_type(fields, 'name=folder or {"name": …, "path": …}')
    for key, value in fields.items():
        if key not in FIELDS:
            raise InvalidRequest(f"An adapter has no field {key!r}. {nearest(str(key), FIELDS)}")
        if not isinstance(value, str) and not (key == "base_model_name" and value is None):
            raise InvalidRequest(f"An adapter's {key} must be text, got {value!r}.")
    missing = [key for key in ("name", "path") if not fields.get(key)]
    if missing:
        raise InvalidRequest(f"An adapter in {dict(fields)!r} has no {' and no '.join(missing)}.")
    return LoraModule(
        fields["name"], located(fields["path"], folder), fields.get("base_model_name")
    )


def located(path: str, folder: Path | None) -> str:
    expanded = Path(path).expanduser()
    return str(expanded if folder is None else folder / expanded)


def wrong_type(value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"must be {wanted}, got {value!r}.")


def check_text(value: object, folder: Path | None) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, 'text in quotes, such as "auto"')
    return value


def check_texts(value: object, folder: Path | None) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(one, str) and one for one in values
    ):
        raise wrong_type(value, "text, or a list of texts that are not empty")
    return tuple(values)


def check_path(value: object, folder: Path | None) -> str:
    if not isinstance(value, str) or not value:
        raise wrong_type(value, "a path in quotes")
    return located(value, folder)


def check_paths(value: object, folder: Path | None) -> tuple[str, ...]:
    return tuple(located(path, folder) for path in check_texts(value, folder))


def check_url_or_path(value: object, folder: Path | None) -> str:
    if isinstance(value, str) and ("://" in value or value == NONE):
        return value
    return check_path(value, folder)


def check_count(value: object, folder: Path | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(value, "a whole number")
    return value


def check_seconds(value: object, folder: Path | None) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(value, "a number of seconds")
    return float(value)


def check_switch(value: object, folder: Path | None) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, "true or false")
    return value


def check_size(value: object, folder: Path | None) -> int:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise wrong_type(value, 'a size such as "2GiB"')
    return parse_bytes(value)


def check_share(value: object, folder: Path | None) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(value, "a number such as 0.5")
    return float(value)


def check_weights(value: object, folder: Path | None) -> tuple[tuple[str, float], ...]:
    """A list of name=number, or one table of names and numbers."""
    if isinstance(value, Mapping):
        pairs = [(str(name), number) for name, number in value.items()]
    elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        pairs = [(name, number) for name, _, number in (one.rpartition("=") for one in value)]
    else:
        raise wrong_type(value, 'a list such as ["acme=2"]')
    try:
        weights = tuple((name, float(number)) for name, number in pairs)
    except (TypeError, ValueError):
        raise wrong_type(value, 'a list such as ["acme=2"]') from None
    for name, weight in weights:
        if not name or not 0 < weight < float("inf"):
            raise InvalidRequest(f"{name}={weight} is no share: write a name and a number over 0.")
    return weights


def check_lora_modules(value: object, folder: Path | None) -> tuple[LoraModule, ...]:
    """A list of name=path and tables, or one table of names and paths."""
    if isinstance(value, Mapping):
        value = [{"name": name, "path": path} for name, path in value.items()]
    if not isinstance(value, list | tuple):
        raise wrong_type(value, 'a list such as ["pirate=adapters/pirate"]')
    return tuple(
        parse_lora_module(one, folder)
        if isinstance(one, str)
        else lora_module_from_fields(one, folder)
        for one in value
    )


CHECKS: dict[Kind, Callable[[object, Path | None], object]] = {
    Kind.TEXT: check_text,
    Kind.TEXTS: check_texts,
    Kind.PATH: check_path,
    Kind.PATHS: check_paths,
    Kind.URL_OR_PATH: check_url_or_path,
    Kind.COUNT: check_count,
    Kind.SECONDS: check_seconds,
    Kind.SWITCH: check_switch,
    Kind.SIZE: check_size,
    Kind.SHARE: check_share,
    Kind.WEIGHTS: check_weights,
    Kind.LORA_MODULES: check_lora_modules,
}
