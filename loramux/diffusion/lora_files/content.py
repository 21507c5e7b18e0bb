"""Finds and reads the file of an image adapter: its tensors, its header and its digest."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from loramux.adapters.identity import FileDigest, compute_cid
from loramux.adapters.images.files import (
    find_image_file,
    make_image_manifest,
    read_image_config,
)
from loramux.adapters.images.refusals import ImageRefusal
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    parse_header,
    read_head,
    read_metadata,
)
from loramux.errors import AdapterRefused, Refusal


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
    """Read a .safetensors file, or the one of a folder; raise AdapterRefused."""
    path, config_path = find_image_file(place)
    config = None if config_path is None else read_image_config(config_path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise AdapterRefused(
            ImageRefusal.FILE_MISSING, f"There is no file {path}.", fix="Check its path."
        ) from error
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
    manifest = make_image_manifest(digest, config)
    return FileContent(path, compute_cid(manifest), len(data), load(data), metadata, config)


def _renamed(error: Refusal, name: str) -> AdapterRefused:
    """Return the reason with this file's name in place of PEFT's."""
    return AdapterRefused(error.code, error.reason.replace(WEIGHTS_NAME, name), fix=error.fix)
