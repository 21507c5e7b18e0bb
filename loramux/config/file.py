"""Read the settings of `loramux serve` from its flags and a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.config.fields import AUTO, PARSERS, Setting, flag
from loramux.config.serve import ALIASES, SETTINGS, ServeConfig, serve_config
from loramux.errors import InvalidRequest, suggest


def load_serve_config(flags: Mapping[str, Any], file: Path | None = None) -> ServeConfig:
    """Return the config of a file and of the given flags; a flag replaces the file's value."""
    found = read_file(file) if file is not None else {}
    given: dict[str, object] = {}
    for key, value in flags.items():
        name = ALIASES.get(key, key)
        if name not in SETTINGS:
            raise InvalidRequest(f"There is no setting {key!r}.", param=key)
        if name in given:
            raise InvalidRequest(f"{flag(name)} is given twice: also as {flag(key)}.", param=name)
        given[name] = parse(name, value, source=flag(key))
    return serve_config({**found, **given})


def read_file(file: Path) -> dict[str, object]:
    """Return the settings of a TOML file. Keys may have - or _; relative paths start at
    its folder.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(
            f"The config file {file} cannot be read: {error.strerror}.", param="config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is not valid TOML: {error}", param="config") from error
    values: dict[str, object] = {}
    for key, value in content.items():
        name = setting_name(key, file)
        if name in values:
            raise InvalidRequest(
                f"{file} sets {name!r} twice, under two spellings of the key.", param=name
            )
        values[name] = parse(name, value, source=f"{key} in {file}", folder=file.parent)
    return values


def setting_name(key: str, file: Path) -> str:
    name = key.replace("-", "_")
    name = ALIASES.get(name, name)
    if name not in SETTINGS:
        keys = [known.replace("_", "-") for known in SETTINGS]
        raise InvalidRequest(
            f"{file} has an unknown key {key!r}. {suggest(key.replace('_', '-'), keys)}",
            param=key,
        )
    return name


def parse(name: str, value: object, *, source: str, folder: Path | None = None) -> object:
    """Return the value of a setting, checked; errors begin with `source`."""
    found = SETTINGS[name]
    try:
        is_auto = found.may_be_auto and value == AUTO
        parsed = AUTO if is_auto else PARSERS[found.kind](value, folder)
        found.check(parsed)
    except InvalidRequest as error:
        if found.is_secret:
            raise InvalidRequest(f"{source}: {_secret_problem(found)}", param=name) from None
        raise InvalidRequest(f"{source}: {error}", param=name) from error
    return parsed


def _secret_problem(setting: Setting) -> str:
    return "must be text." if setting.limit is None else f"must be {setting.limit.text}."
