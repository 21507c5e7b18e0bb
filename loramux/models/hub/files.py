"""Which files of a repository are needed to serve its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loramux.errors import UnsupportedModel
from loramux.models.folder import INDEX_NAME, SINGLE_NAME, listed
from loramux.models.quantised.config import QUANTISATION_FILES
from loramux.types.hub_id import HubId

CONFIG_NAME = "config.json"
# Files of a folder besides its weights, and the folder of named chat templates.
SIDE_FILES = frozenset(
    {
        CONFIG_NAME,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        *QUANTISATION_FILES,
    }
)
TEMPLATE_FOLDER = "additional_chat_templates/"
# A tokenizer can be built from any of these.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLES = (".bin", ".pt", ".pth")
SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    path: str
    size_bytes: int
    blob: str | None
    """Name of its content in the cache: the SHA-256, or the git hash of a small file."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]
    gguf_architecture: str | None
    """What the hub has read from the GGUF files, if there are any."""

    @property
    def gguf_names(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(".gguf"))

    @property
    def weight_names(self) -> list[str]:
        """The safetensors files of the top folder."""
        return sorted(n for n in self.files if n.endswith(".safetensors") and "/" not in n)


def is_gguf(hub_id: HubId, listing: Listing) -> bool:
    """Whether a GGUF file is served: one is named, or there are no safetensors."""
    return hub_id.file is not None or bool(listing.gguf_names and not listing.weight_names)


def gguf_of(hub_id: HubId, listing: Listing) -> RemoteFile:
    """Return the file that is named, or the only one."""
    found = listing.gguf_names
    name = hub_id.file or (found[0] if len(found) == 1 else None)
    if name is None:
        raise UnsupportedModel(
            f"{hub_id} has {len(found)} GGUF files. Choose one, as "
            f"{hub_id.repository}:{found[0]}. There are {listed(found)}."
        )
    if name not in listing.files:
        there = f"There are {listed(found)}." if found else "It has no GGUF files at all."
        raise UnsupportedModel(f"{hub_id.repository} has no file {name}. {there}")
    if SPLIT_GGUF.search(name):
        raise UnsupportedModel(
            f"{name} of {hub_id.repository} is one part of a GGUF file that was split, which is "
            "not supported. Use a single file, or the repository with safetensors."
        )
    return listing.files[name]


def check_folder(hub_id: HubId, listing: Listing) -> None:
    """Refuse a repository without config, safetensors or tokenizer."""
    files = listing.files
    if CONFIG_NAME not in files:
        if "adapter_config.json" in files:
            raise UnsupportedModel(
                f"{hub_id} holds a LoRA adapter, not a base model: give its base as --model, and "
                f"the adapter as --lora-modules name=hf:{hub_id}."
            )
        raise UnsupportedModel(
            f"{hub_id} has no {CONFIG_NAME} and no GGUF file: it is not a model of transformers. "
            "Choose another repository."
        )
    if not listing.weight_names:
        if any(name.endswith(PICKLES) for name in files):
            raise UnsupportedModel(
                f"{hub_id} has only pickle weights ({', '.join(PICKLES)}), which can run code when "
                "opened. Choose a repository or revision with safetensors (often refs/pr/1)."
            )
        raise UnsupportedModel(f"{hub_id} has no safetensors weights. Choose another repository.")
    if not any(name in files for name in TOKENIZER_FILES):
        raise UnsupportedModel(f"{hub_id} has no tokenizer.json. Choose another repository.")


def side_files(listing: Listing) -> list[RemoteFile]:
    return [
        file
        for name, file in listing.files.items()
        if name in SIDE_FILES or name.startswith(TEMPLATE_FOLDER)
    ]


def weights_of(hub_id: HubId, listing: Listing, shards: list[str] | None) -> list[RemoteFile]:
    """Return the weight files that the loader reads; `shards` are those that an index names."""
    found = listing.weight_names
    if SINGLE_NAME in found:
        return [listing.files[SINGLE_NAME]]
    names = found if shards is None else shards
    if shards is None and len(found) > 1:
        raise UnsupportedModel(
            f"{hub_id} has {len(found)} safetensors files but no {INDEX_NAME} that lists them."
        )
    missing = [name for name in names if name not in listing.files]
    if missing:
        raise UnsupportedModel(f"{hub_id}: {INDEX_NAME} names missing files: {listed(missing)}.")
    return [listing.files[name] for name in names]
