"""The manifest of a folder that is in no store yet."""

from __future__ import annotations

from pathlib import Path

from loramux.adapters.identity import Manifest, make_manifest
from loramux.adapters.peft.folder import open_folder, refusing_os_errors
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, find_weights
from loramux.adapters.peft.tokenizer_files import digest_tokenizer_files
from loramux.adapters.peft.types.configs import read_adapter_config
from loramux.store.files import hash_file


def folder_manifest(folder: Path) -> Manifest:
    """Reads all files; raises AdapterNotFound or AdapterRefused."""
    source = open_folder(folder)
    config = read_adapter_config(source)
    weights = find_weights(source)
    with refusing_os_errors(weights):
        files = {WEIGHTS_NAME: hash_file(weights), **digest_tokenizer_files(source)}
    return make_manifest(config.canonical(), files)
