"""Finds and reads the file of an image adapter: its tensors, its header and its digest."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from loramux.adapters.identity import FileDigest, compute_cid
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    parse_header,
    read_head,
    read_metadata,
)
from loramux.diffusion.lora_files.refusals import ImageRefusal
from loramux.errors import AdapterRefused, Refusal

FORMAT = "loramux-image-adapter/1"
DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class FileContent:
    """An adapter file whose structure was checked."""

    path: Path
    cid: str
    num_bytes: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None
    """adapter_config.json of a PEFT folder."""


def read_file(place: Path) -> FileContent:
    """Reads a .safetensors file, or the one of a folder; raises AdapterRefused."""
    path, config = _find(place)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AdapterRefused(
            RefusalCode.UNREADABLE, f"{path} cannot be read: {error.strerror}."
        ) from error
    try:
        head = read_head(io.BytesIO(data), len(data))
        parse_header(head[LENGTH_BYTES:], len(data) - len(head))
        metadata = {key: str(value) for key, value in read_metadata(head).items()}
    except AdapterRefused as error:
        raise _renamed(error, path.name) from error
    digest = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    manifest = {
        "format": FORMAT,
        "config": {} if config is None else config,
        "files": {"weights": {"sha256": digest.sha256, "size": digest.size}},
    }
    return FileContent(path, compute_cid(manifest), len(data), load(data), metadata, config)


def _find(place: Path) -> tuple[Path, Mapping[str, Any] | None]:
    if not place.is_dir():
        if place.suffix != ".safetensors" and place.is_file():
            raise AdapterRefused(
                RefusalCode.NOT_SAFETENSORS,
                f"{place.name} is not a .safetensors file; others can run code when they are read.",
                fix="Save the adapter as safetensors.",
            )
        return place, None
    config = place / CONFIG_NAME
    if (place / WEIGHTS_NAME).exists() and config.exists():
        return place / WEIGHTS_NAME, _read_config(config)
    if (place / DIFFUSERS_NAME).exists():
        return place / DIFFUSERS_NAME, None
    files = sorted(place.glob("*.safetensors"))
    if len(files) == 1:
        return files[0], None
    code = ImageRefusal.AMBIGUOUS_FILE if files else RefusalCode.WEIGHTS_MISSING
    raise AdapterRefused(
        code,
        f"{place} has {len(files)} .safetensors files"
        f"{': ' + name_some([file.name for file in files]) if files else ''}.",
        fix="Name the file itself.",
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterRefused(RefusalCode.CONFIG_NOT_JSON, f"{path.name}: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterRefused(RefusalCode.CONFIG_NOT_JSON, f"{path.name} is not a JSON object.")
    return config


def _renamed(error: Refusal, name: str) -> AdapterRefused:
    """The reason with this file's name in place of PEFT's."""
    return AdapterRefused(error.code, error.reason.replace(WEIGHTS_NAME, name), fix=error.fix)
