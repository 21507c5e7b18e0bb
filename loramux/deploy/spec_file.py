"""Reads a ModelSpec from a YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from loramux.config.fields import Kind, located_source
from loramux.config.file import parse
from loramux.config.serve import SETTINGS
from loramux.errors import InvalidRequest, suggest
from loramux.launch.specs import (
    MODEL_ID,
    BatchPolicy,
    FleetConfig,
    LoRAAdapter,
    LoRAConfig,
    ModelSpec,
    ResourceConfig,
    ScalingConfig,
)

_T = TypeVar("_T")
_PATHS = (Kind.PATH, Kind.PATHS, Kind.URL_OR_PATH)


def read_spec(file: Path) -> ModelSpec:
    """Read a file; relative paths in it start at its folder. Raises InvalidRequest."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is not valid YAML: {error}") from error
    try:
        return spec_of(content, file.absolute().parent)
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}: {error}", param=error.param) from error


def spec_of(content: object, folder: Path) -> ModelSpec:
    """Make a spec of the fields of a file in `folder`."""
    fields = dict(_table(content, "the file", ModelSpec))
    for name, part in _PARTS.items():
        if fields.get(name) is not None:
            fields[name] = part(fields[name], folder)
    for name in ("backend_kwargs", "settings", "limits"):
        fields[name] = dict(_mapping(fields.get(name) or {}, name))
    model = fields["backend_kwargs"].get(MODEL_ID)
    if isinstance(model, str):
        fields["backend_kwargs"][MODEL_ID] = parse("model", model, source=MODEL_ID, folder=folder)
    fields["settings"] = {
        key.replace("-", "_"): _located(key.replace("-", "_"), value, folder)
        for key, value in fields["settings"].items()
    }
    return _made(ModelSpec, fields, "the file")


def _located(name: str, value: object, folder: Path) -> object:
    if name in SETTINGS and SETTINGS[name].kind in _PATHS:
        found = parse(name, value, source=f"settings.{name}", folder=folder)
        return list(found) if isinstance(found, tuple) else found
    return value


def _lora(content: object, folder: Path) -> LoRAConfig:
    fields = dict(_table(content, "lora", LoRAConfig))
    adapters = {}
    for name, value in _mapping(fields.get("adapters") or {}, "lora.adapters").items():
        where = f"lora.adapters.{name}"
        given = {"source": value} if isinstance(value, str) else _table(value, where, LoRAAdapter)
        adapter = _made(LoRAAdapter, given, where)
        adapters[name] = dataclasses.replace(adapter, source=located_source(adapter.source, folder))
    return _made(LoRAConfig, fields | {"adapters": adapters}, "lora")


def _fleet(content: object, folder: Path) -> FleetConfig:
    fields = dict(_table(content, "fleet", FleetConfig))
    scaling = fields.get("scaling")
    if scaling is not None:
        where = "fleet.scaling"
        fields["scaling"] = _made(ScalingConfig, _table(scaling, where, ScalingConfig), where)
    return _made(FleetConfig, fields, "fleet")


def _resources(content: object, folder: Path) -> ResourceConfig:
    return _made(ResourceConfig, _table(content, "resources", ResourceConfig), "resources")


def _batch_policy(content: object, folder: Path) -> BatchPolicy:
    return _made(BatchPolicy, _table(content, "batch_policy", BatchPolicy), "batch_policy")


_PARTS = {
    "lora": _lora,
    "fleet": _fleet,
    "resources": _resources,
    "batch_policy": _batch_policy,
}


def _mapping(content: object, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise InvalidRequest(f"{where} must be a table of names and values, got {content!r}.")
    return content


def _table(content: object, where: str, kind: type) -> Mapping[str, Any]:
    """Return the fields of a dataclass; raise InvalidRequest for others."""
    table = _mapping(content, where)
    known = [one.name for one in dataclasses.fields(kind)]
    for key in table:
        if key not in known:
            raise InvalidRequest(f"{where} has an unknown key {key!r}. {suggest(key, known)}")
    return table


def _made(kind: type[_T], fields: Mapping[str, Any], where: str) -> _T:
    """Make a dataclass whose plain fields have the types of their defaults."""
    for one in dataclasses.fields(cast("Any", kind)):
        value, default = fields.get(one.name), one.default
        if one.name not in fields and default is dataclasses.MISSING:
            if one.default_factory is dataclasses.MISSING:
                raise InvalidRequest(f"{where} has no {one.name}.", param=one.name)
        elif one.name in fields and isinstance(default, bool | int | float | str):
            allowed = (int, float) if isinstance(default, float) else type(default)
            is_right = isinstance(value, allowed) and isinstance(value, bool) == isinstance(
                default, bool
            )
            if not is_right:
                name = type(default).__name__
                raise InvalidRequest(f"{where}.{one.name} must be {name}, got {value!r}.")
    try:
        return kind(**fields)
    except TypeError as error:
        raise InvalidRequest(f"{where}: {error}") from error
