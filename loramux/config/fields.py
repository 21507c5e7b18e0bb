"""The settings of `loramux serve`: their kinds, their limits, and how a value is parsed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec

from loramux.errors import InvalidRequest, suggest
from loramux.types.hub_id import HUB_PREFIX, parse_hub_id

NONE = "none"
REMOTE_PREFIXES = ("hf:", "s3://", "gs://", "az://", "http://", "https://")
"""Beginnings of the ids of remote adapter sources; everything else is a local folder."""
AUTO = "auto"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Parse '2GiB', '512M', '1.5 GB' or a plain number; all units are powers of 1024."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size. Write it like 512MiB, 2GiB or 1073741824.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class Kind(Enum):
    """The type of a setting's value; it selects the parser and the type of the flag."""

    TEXT = auto()
    TEXTS = auto()
    PATH = auto()
    PATHS = auto()
    MODEL = auto()
    URL_OR_PATH = auto()
    COUNT = auto()
    SECONDS = auto()
    SWITCH = auto()
    SIZE = auto()
    FRACTION = auto()
    SHARES = auto()
    LORA_MODULES = auto()


@dataclass(frozen=True, slots=True)
class Limit:
    """The values that a setting may have; None, the absent value, is always allowed."""

    text: str
    allows: Callable[[Any], bool]

    def check(self, value: object) -> None:
        if value is not None and not self.allows(value):
            raise InvalidRequest(f"must be {self.text}, got {value!r}.")


def at_least(minimum: int) -> Limit:
    return Limit(f"{minimum} or more", lambda value: value >= minimum)


def one_of(*values: str) -> Limit:
    return Limit(f"one of {', '.join(values)}", lambda value: value in values)


NOT_NEGATIVE_SECONDS = Limit("0 or more seconds", lambda value: 0 <= value < math.inf)
POSITIVE_SECONDS = Limit("over 0 seconds", lambda value: 0 < value < math.inf)
FRACTION = Limit("over 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a config dataclass that is a flag, a key of the TOML file and a line of help."""

    name: str
    """The key in the TOML file, with `_`; the flag has `-` instead."""
    field: str
    """The field of the dataclass that holds the value."""
    kind: Kind
    group: str
    help: str
    default: object
    metavar: str | None
    limit: Limit | None
    is_inverted: bool
    """The field holds the negation of the switch: `no_prefix_cache` sets `prefix_cache`."""
    aliases: tuple[str, ...]
    """Former names, which are accepted but not shown."""
    is_secret: bool
    """Errors do not show the value."""

    @property
    def may_be_auto(self) -> bool:
        """Whether the value may be `auto`, which the engine replaces when it knows its device."""
        return self.default == AUTO

    def check(self, value: object) -> None:
        """Raise InvalidRequest for a value over the limit."""
        if self.limit is None or (self.may_be_auto and value == AUTO):
            return
        if not self.is_secret:
            self.limit.check(value)
        elif value is not None and not self.limit.allows(value):
            raise InvalidRequest(f"must be {self.limit.text}.")


def setting(  # noqa: PLR0913  (what a flag, a key and a line of help need)
    default: object,
    kind: Kind,
    group: str,
    help_text: str,
    *,
    name: str | None = None,
    metavar: str | None = None,
    limit: Limit | None = None,
    is_inverted: bool = False,
    is_secret: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field with the metadata of a setting.

    `name` is the setting's name where it differs from the field's. A secret setting may contain a
    password and is left out of the dataclass's repr.
    """
    metadata = {
        "name": name,
        "kind": kind,
        "group": group,
        "help": help_text,
        "metavar": metavar,
        "limit": limit,
        "is_inverted": is_inverted,
        "aliases": aliases,
        "is_secret": is_secret,
    }
    return field(default=default, metadata=metadata, repr=not is_secret)


def settings_of(config: type) -> Iterator[Setting]:
    """Yield the settings among the fields of a config dataclass, in order."""
    for found in dataclasses.fields(config):
        if "kind" in found.metadata:
            facts = dict(found.metadata)
            default = not found.default if facts["is_inverted"] else found.default
            name = facts.pop("name") or found.name
            yield Setting(name=name, field=found.name, default=default, **facts)


def check_limits(config: object) -> None:
    """Raise InvalidRequest for the first field of a config dataclass that is over its limit."""
    for found in settings_of(type(config)):
        if not found.is_inverted:
            try:
                found.check(getattr(config, found.field))
            except InvalidRequest as error:
                raise InvalidRequest(f"{found.field} {error}", param=found.name) from None


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that the server loads at start."""

    name: str
    path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        for part in ("name", "path"):
            if not getattr(self, part):
                raise InvalidRequest(
                    f"An adapter has no {part}. Write name=folder.", param="lora_modules"
                )


MODULE_FIELDS = ("name", "path", "base_model_name")


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def parse_lora_module(text: str, folder: Path | None = None) -> LoraModule:
    """Parse name=path, or vLLM's JSON form; relative paths start at `folder`."""
    if text.lstrip().startswith("{"):
        try:
            fields = msgspec.json.decode(text.encode(errors="surrogateescape"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{text!r} is not valid JSON: {error}.") from error
        return lora_module_from_fields(fields, folder)
    name, separator, path = text.partition("=")
    if not separator or not name.strip() or not path.strip():
        raise InvalidRequest(
            f"{text!r} does not name an adapter. Write name=folder or name=hf:owner/repository, "
            "for example pirate=examples/adapters/pirate."
        )
    return LoraModule(name.strip(), located_source(path.strip(), folder))


def lora_module_from_fields(fields: object, folder: Path | None) -> LoraModule:
    if not isinstance(fields, Mapping):
        raise wrong_type(fields, 'name=folder or {"name": …, "path": …}')
    for key, value in fields.items():
        if key not in MODULE_FIELDS:
            raise InvalidRequest(
                f"An adapter has no field {key!r}. {suggest(str(key), MODULE_FIELDS)}"
            )
        if not isinstance(value, str) and not (key == "base_model_name" and value is None):
            raise InvalidRequest(f"An adapter's {key} must be text, got {value!r}.")
    missing = [key for key in ("name", "path") if not fields.get(key)]
    if missing:
        raise InvalidRequest(f"An adapter in {dict(fields)!r} has no {' and no '.join(missing)}.")
    return LoraModule(
        fields["name"], located_source(fields["path"], folder), fields.get("base_model_name")
    )


def located(path: str, folder: Path | None) -> str:
    expanded = Path(path).expanduser()
    return str(expanded if folder is None else folder / expanded)


def located_source(path: str, folder: Path | None) -> str:
    return path if path.startswith(REMOTE_PREFIXES) else located(path, folder)


def wrong_type(value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"must be {wanted}, got {value!r}.")


def parse_text(value: object, folder: Path | None) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, 'text in quotes, such as "auto"')
    return value


def parse_texts(value: object, folder: Path | None) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(one, str) and one for one in values
    ):
        raise wrong_type(value, "text, or a list of texts that are not empty")
    return tuple(values)


def parse_path(value: object, folder: Path | None) -> str:
    if not isinstance(value, str) or not value:
        raise wrong_type(value, "a path in quotes")
    return located(value, folder)


def parse_paths(value: object, folder: Path | None) -> tuple[str, ...]:
    return tuple(located(path, folder) for path in parse_texts(value, folder))


def parse_model(value: object, folder: Path | None) -> str:
    """Accept a path, or the name of a model on the hub if there is no such path."""
    path = parse_path(value, folder)
    text = str(value)
    is_on_hub = text.startswith(HUB_PREFIX) or (
        parse_hub_id(text) is not None and not Path(path).exists()
    )
    return text if is_on_hub else path


def parse_url_or_path(value: object, folder: Path | None) -> str:
    if isinstance(value, str) and ("://" in value or value == NONE):
        return value
    return parse_path(value, folder)


def parse_count(value: object, folder: Path | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(value, "a whole number")
    return value


def parse_seconds(value: object, folder: Path | None) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(value, "a number of seconds")
    return float(value)


def parse_switch(value: object, folder: Path | None) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, "true or false")
    return value


def parse_size(value: object, folder: Path | None) -> int:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise wrong_type(value, 'a size such as "2GiB"')
    return parse_bytes(value)


def parse_fraction(value: object, folder: Path | None) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(value, "a number such as 0.5")
    return float(value)


def parse_shares(value: object, folder: Path | None) -> tuple[tuple[str, float], ...]:
    """Accept a list of name=number, or one table of names and numbers."""
    if isinstance(value, Mapping):
        pairs = [(str(name), number) for name, number in value.items()]
    elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        pairs = [(name, number) for name, _, number in (one.rpartition("=") for one in value)]
    else:
        raise wrong_type(value, 'a list such as ["acme=2"]')
    try:
        shares = tuple((name, float(number)) for name, number in pairs)
    except (TypeError, ValueError):
        raise wrong_type(value, 'a list such as ["acme=2"]') from None
    for name, share in shares:
        if not name or not 0 < share < math.inf:
            raise InvalidRequest(f"{name}={share} is not a share. Write name=number, over 0.")
    return shares


def parse_lora_modules(value: object, folder: Path | None) -> tuple[LoraModule, ...]:
    """Accept a list of name=path and tables, or one table of names and paths."""
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


PARSERS: dict[Kind, Callable[[object, Path | None], object]] = {
    Kind.TEXT: parse_text,
    Kind.TEXTS: parse_texts,
    Kind.PATH: parse_path,
    Kind.PATHS: parse_paths,
    Kind.MODEL: parse_model,
    Kind.URL_OR_PATH: parse_url_or_path,
    Kind.COUNT: parse_count,
    Kind.SECONDS: parse_seconds,
    Kind.SWITCH: parse_switch,
    Kind.SIZE: parse_size,
    Kind.FRACTION: parse_fraction,
    Kind.SHARES: parse_shares,
    Kind.LORA_MODULES: parse_lora_modules,
}
