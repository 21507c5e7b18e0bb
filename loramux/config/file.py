"""Settings of `loramux serve` from its flags and a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.config.fields import CHECKS, flag, nearest
from loramux.config.serve import SETTINGS, ServeConfig
from loramux.errors import InvalidRequest


def load_serve_config(flags: Mapping[str, Any], file: Path | None = None) -> ServeConfig:
    """`flags` holds only what was given; each of them replaces the file's value."""
    found = read_file(file) if file is not None else {}
    given = {name: check(name, value, source=flag(name)) for name, value in flags.items()}
    return ServeConfig(**{**found, **given})


def read_file(file: Path) -> dict[str, Any]:
    """Keys may be written with - or _; relative paths start at the file's folder."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(
            f"The config file {file} cannot be read: {error.strerror}.", param="config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is not valid TOML: {error}", param="config") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = known_name(key, file)
        if name in values:
            raise InvalidRequest(f"{file} sets {key!r} twice: with - and with _.", param=name)
        values[name] = check(name, value, source=f"{key} in {file}", folder=file.parent)
    return values


def known_name(key: str, file: Path) -> str:
    name = key.replace("-", "_")
    if name not in SETTINGS:
        keys = [known.replace("_", "-") for known in SETTINGS]
        raise InvalidRequest(
            f"{file} has an unknown key {key!r}. {nearest(key.replace('_', '-'), keys)}",
            param=key,
        )
    return name


def check(name: str, value: object, *, source: str, folder: Path | None = None) -> object:
    if name not in SETTINGS:
        raise InvalidRequest(f"There is no setting {name!r}.", param=name)
    try:
        return CHECKS[SETTINGS[name].metadata["kind"]](value, folder)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error}", param=name) from error
