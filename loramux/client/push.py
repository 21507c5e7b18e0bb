"""Adapters of a trainer as requests: tensors in memory, or a model of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any
from urllib.parse import quote

import msgspec

from loramux.client.wire import Call, get, multipart

OCTETS = "application/octet-stream"
# Longer configs go as a form: servers limit the headers of a request.
_MAX_HEADER_CHARACTERS = 8000
_MAX_WAIT_S = 600


class PushedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A version that answers requests from now on."""

    name: str
    version: int
    cid: str
    rank: int = 0
    warnings: tuple[str, ...] = ()
    received_s: float = 0.0
    seconds: float = 0.0


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    cid: str


def push_call(
    name: str, tensors: Mapping[str, Any], config: Any, *, version: int | None = None
) -> Call:
    """`config`: that of PEFT, or the fields of adapter_config.json; `tensors`: torch or numpy."""
    text = json.dumps(config_fields(config), default=_plain, separators=(",", ":"))
    path = f"/v1/adapters/{quote(name, safe='/@')}:push"
    if version is not None:
        path += f"?version={version}"
    weights = _safetensors(tensors)
    if len(text) > _MAX_HEADER_CHARACTERS:
        body, kind = multipart({"config": text.encode(), "weights": weights})
        return Call(method="POST", path=path, body=body, headers={"content-type": kind})
    headers = {"content-type": OCTETS, "x-loramux-config": text}
    return Call(method="POST", path=path, body=weights, headers=headers)


def version_call(name: str, min_version: int | None, timeout_s: float) -> Call:
    path = f"/v1/adapters/{quote(name, safe='/@')}/version"
    if min_version is None:
        return get(path)
    return get(f"{path}?min_version={min_version}&timeout_s={min(int(timeout_s), _MAX_WAIT_S)}")


def of_peft(model: Any, adapter: str | None = None) -> tuple[dict[str, Any], Any]:
    """Return tensors and config of an adapter of a PEFT model; default: the active one."""
    # PEFT's function has no types.
    tensors_of: Any = import_module("peft").get_peft_model_state_dict
    name = adapter or model.active_adapter
    return tensors_of(model, adapter_name=name), model.peft_config[name]


def config_fields(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    fields: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return fields


def _plain(value: Any) -> Any:
    """Return what JSON can hold for the values of PEFT's configs, as PEFT saves them."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if is_dataclass(value):
        return {name: one for name, one in vars(value).items() if not name.startswith("_")}
    return getattr(value, "value", str(value))


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    if all(hasattr(one, "detach") for one in tensors.values()):
        from safetensors.torch import save

        return save({name: one.detach().contiguous() for name, one in tensors.items()})
    from safetensors.numpy import save as save_arrays

    return save_arrays(dict(tensors))
