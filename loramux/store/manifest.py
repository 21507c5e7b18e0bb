"""The manifest of a folder that is in no store yet."""

from __future__ import annotations

from pathlib import Path

from loramux.adapters.identity import Manifest, make_manifest
from loramux.adapters.images.files import (
    find_image_file,
    is_image_adapter,
    make_image_manifest,
    read_image_config,
)
from loramux.adapters.peft.folder import open_folder, refusing_os_errors
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, find_weights
from loramux.adapters.peft.tokenizer_files import digest_tokenizer_files
from loramux.adapters.peft.types.configs import read_adapter_config
from loramux.store.files import hash_file
from loramux.types.modality import Modality


def folder_manifest(folder: Path, modality: Modality | None = None) -> Manifest:
    """Read all files; raise AdapterNotFound or AdapterRefused.

    `modality`: what the adapter is for; None: its files tell.
    """
    if modality == "image" or (modality is None and is_image_adapter(folder)):
        path, config_path = find_image_file(folder)
        with refusing_os_errors(path):
            digest = hash_file(path)
        config_fields = None if config_path is None else read_image_config(config_path)
        return make_image_manifest(digest, config_fields)
    source = open_folder(folder)
    config = read_adapter_config(source)
    weights = find_weights(source)
    with refusing_os_errors(weights):
        files = {WEIGHTS_NAME: hash_file(weights), **digest_tokenizer_files(source)}
    return make_manifest(config.canonical(), files)
