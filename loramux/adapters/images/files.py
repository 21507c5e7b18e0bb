"""The file of an image adapter: which one it is in a folder, and its manifest. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.adapters.identity import FileDigest, Manifest
from loramux.adapters.images.refusals import ImageRefusal
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.errors import AdapterRefused

FORMAT = "loramux-image-adapter/1"
DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
CONFIG_NAME = "adapter_config.json"
SUFFIX = ".safetensors"
# The key of the file in a manifest: its name does not belong to the content.
_WEIGHTS = "weights"


def is_image_adapter(place: Path) -> bool:
    """Whether a file or folder is taken for an adapter of an image model.

    A folder with a file of PEFT's names is taken for one of a language model.
    """
    if place.is_file():
        return place.suffix == SUFFIX
    is_peft = any((place / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME))
    return not is_peft and bool(_image_files(place))


def find_image_file(place: Path) -> tuple[Path, Path | None]:
    """Return the weights of a file or folder, and the config of a PEFT folder.

    Raises AdapterRefused if it is not clear which file is meant.
    """
    if not place.is_dir():
        if place.suffix != SUFFIX and place.is_file():
            raise AdapterRefused(
                RefusalCode.NOT_SAFETENSORS,
                f"{place.name} is not a .safetensors file; others can run code when they are read.",
                fix="Save the adapter as safetensors.",
            )
        return place, None
    config = place / CONFIG_NAME
    if (place / WEIGHTS_NAME).exists() and config.exists():
        return place / WEIGHTS_NAME, config
    if (place / DIFFUSERS_NAME).exists():
        return place / DIFFUSERS_NAME, None
    files = _image_files(place)
    if len(files) == 1:
        return files[0], None
    raise ambiguous(str(place), [file.name for file in files])


def _image_files(folder: Path) -> list[Path]:
    """Return the files by name; none if the folder is gone meanwhile."""
    try:
        return sorted(folder.glob(f"*{SUFFIX}"))
    except OSError:
        return []


def ambiguous(place: str, names: list[str]) -> AdapterRefused:
    """Return the refusal of a folder that has none or several files."""
    code = ImageRefusal.AMBIGUOUS_FILE if names else RefusalCode.WEIGHTS_MISSING
    return AdapterRefused(
        code,
        f"{place} has {len(names)} {SUFFIX} files{': ' + name_some(names) if names else ''}.",
        fix="Name the file itself.",
    )


def read_image_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterRefused(RefusalCode.CONFIG_NOT_JSON, f"{path.name}: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterRefused(RefusalCode.CONFIG_NOT_JSON, f"{path.name} is not a JSON object.")
    return config


def make_image_manifest(weights: FileDigest, config: Mapping[str, Any] | None) -> Manifest:
    """Return the manifest by which an image adapter has its CID."""
    return {
        "format": FORMAT,
        "config": {} if config is None else config,
        "files": {_WEIGHTS: {"sha256": weights.sha256, "size": weights.size}},
    }


def is_image_manifest(manifest: Manifest) -> bool:
    return manifest.get("format") == FORMAT


def file_name_of(manifest: Manifest) -> str:
    """Return the name under which the weights of a manifest are kept."""
    return WEIGHTS_NAME if manifest.get("config") else DIFFUSERS_NAME
