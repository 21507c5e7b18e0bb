"""Reads what a model folder says about itself: config, names of the weight files, name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.errors import UnsupportedModel
from loramux.models.architectures import QUANTISATION_KEYS, base_info, parse_config
from loramux.models.gguf_file import read_gguf_config
from loramux.models.quantised.config import QUANTISATION_FILES
from loramux.types.hub_id import MODEL_FORMS
from loramux.types.model import BaseModelInfo

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
MAX_NAMES_IN_MESSAGE = 8
QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


def describe_model(path: Path) -> BaseModelInfo:
    """Read the shapes of a model folder, a GGUF file or a lone config.json; no weights are read."""
    name = model_name(path.resolve().parent if path.suffix == ".json" else path)
    return base_info(parse_config(read_any_config(path)), name)


def read_any_config(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise UnsupportedModel(
            f"{path} does not exist: give {MODEL_FORMS}, or the config.json of a model."
        )
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    return read_config(path) if path.is_dir() else read_json_object(path)


def read_config(folder: Path) -> dict[str, Any]:
    config_file = folder / "config.json"
    if not config_file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedModel(
                f"{folder} holds a LoRA adapter, not a base model: give the folder of its base."
            )
        raise UnsupportedModel(f"{folder} has no config.json: give {MODEL_FORMS}.")
    config = read_json_object(config_file)
    for file in quantisation_files(folder, config):
        method = QUANTISATION_FILES[file.name]
        config["quantization_config"] = {"quant_method": method, **read_json_object(file)}
    return config


def quantisation_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the file that says how weights are quantised, if config.json does not."""
    text = config.get("text_config") or {}
    if any(part.get(key) for part in (config, text) for key in QUANTISATION_KEYS):
        return []
    found = [folder / name for name in QUANTISATION_FILES if (folder / name).is_file()]
    return found[:1]


def config_files(folder: Path) -> list[Path]:
    """Return config.json, and the file of its quantisation settings if they lie beside it."""
    config_file = folder / "config.json"
    return [config_file, *quantisation_files(folder, read_json_object(config_file))]


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{file} is not a JSON object.")
    return content


def read_json_list(file: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise UnsupportedModel(f"{file} is not a list of JSON objects.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, the shards named by the index, or the only safetensors file."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return indexed_files(index)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise UnsupportedModel(
            f"{folder} has {len(found)} safetensors files but no {index.name} that lists them."
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModel(
            f"{folder} has only pickle weights (.bin, .pt), which can run code when opened. "
            "Convert them to safetensors."
        )
    raise UnsupportedModel(f"{folder} has no safetensors weights.")


def indexed_files(index: Path) -> list[Path]:
    names = shard_names(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UnsupportedModel(f"{index} names files that are missing: {listed(missing)}.")
    return [index.parent / name for name in names]


def shard_names(index: Path) -> list[str]:
    """Return the files that an index names; refuse names outside its folder."""
    names = sorted(set(read_json_object(index).get("weight_map", {}).values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UnsupportedModel(f"{index} names files outside its folder: {listed(outside)}.")
    return names


def model_name(path: Path) -> str:
    """Return the served name: of the repository in a hub cache, of the file, or of the folder."""
    # A file of the hub cache is a link to its content, so only a folder is resolved.
    place = path.absolute() if path.suffix == ".gguf" else path.resolve()
    for folder in (place, *place.parents):
        repository = folder.parent.parent.name
        if folder.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
    return QUANTIZATION_SUFFIX.sub("", path.stem) if path.suffix == ".gguf" else place.name


def eos_token_ids(folder: Path, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json and config.json."""
    generation = folder / "generation_config.json"
    settings = read_json_object(generation) if generation.is_file() else {}
    found: list[int] = []
    for value in (settings.get("eos_token_id"), hf_config.get("eos_token_id")):
        found += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(found))


def listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
