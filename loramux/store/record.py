"""The record of an adapter in the store: its manifest and the digest of each file.

An adapter is in the store if and only if its record is. `files.find_record` returns the record of
an adapter folder inside a store, and with it the CID, the config and the sizes, without torch and
without hashing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from loramux.adapters.identity import FileDigest, Manifest, compute_cid, is_digest
from loramux.adapters.images.files import file_name_of, is_image_manifest
from loramux.adapters.peft.config import CONFIG_NAME, decode_json
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.adapters.peft.types.configs import AdapterConfig, parse_adapter_config
from loramux.base.canonical_json import canonical_json
from loramux.errors import AdapterRefused, StoreDamaged
from loramux.types.modality import Modality

MAX_RECORD_BYTES = 2**22
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class Record:
    """The CID covers the manifest; the config file is kept as it was first pushed."""

    cid: str
    manifest: Manifest
    config_file: FileDigest | None
    """None: an adapter of an image model without a PEFT config."""
    covered_files: Mapping[str, FileDigest]
    """The weights, and the tokenizer files if there are any."""

    @property
    def files(self) -> dict[str, FileDigest]:
        config = {} if self.config_file is None else {CONFIG_NAME: self.config_file}
        return {**config, **self.covered_files}

    @property
    def modality(self) -> Modality:
        return "image" if is_image_manifest(self.manifest) else "text"

    @property
    def weights(self) -> FileDigest | None:
        """The digest of the weights."""
        name = file_name_of(self.manifest) if self.modality == "image" else WEIGHTS_NAME
        return self.covered_files.get(name)

    @property
    def size_bytes(self) -> int:
        return sum(digest.size for digest in self.files.values())

    def encode(self) -> bytes:
        file = self.config_file
        config = None if file is None else {"sha256": file.sha256, "size": file.size}
        return canonical_json({"config_file": config, "manifest": self.manifest})


def make_record(manifest: Manifest, config_file: FileDigest | None) -> Record:
    """Raise ValueError for a manifest that is broken."""
    files = read_files(manifest)
    if is_image_manifest(manifest):
        if len(files) != 1 or (config_file is None) != (not manifest["config"]):
            raise ValueError("an image adapter has one file, and a config if the manifest has one")
        files = {file_name_of(manifest): next(iter(files.values()))}
    elif config_file is None:
        raise ValueError("it has no config")
    return Record(compute_cid(manifest), manifest, config_file, files)


def decode_record(content: bytes, cid: str) -> Record:
    """Decode a record; raise StoreDamaged unless it belongs to this CID."""
    try:
        fields = json.loads(content.decode("utf-8"))
        config = fields["config_file"]
        record = make_record(fields["manifest"], None if config is None else read_digest(config))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreDamaged(f"The record of {cid} is broken: {error}.") from error
    if record.cid != cid:
        raise StoreDamaged(f"The record of {cid} describes {record.cid}.")
    return record


def read_files(manifest: Manifest) -> dict[str, FileDigest]:
    files = manifest["files"]
    if not isinstance(files, Mapping):
        raise ValueError("its files are not an object")
    for name in files:
        if not FILE_NAME.fullmatch(name) or name == CONFIG_NAME:
            raise ValueError(f"{name!r} is not a valid name for a file")
    return {name: read_digest(value) for name, value in files.items()}


def read_digest(value: Mapping[str, object]) -> FileDigest:
    sha256, size = value["sha256"], value["size"]
    if not isinstance(sha256, str) or not is_digest(sha256):
        raise ValueError("a digest is not 64 hex digits")
    if type(size) is not int or size < 0:
        raise ValueError("a size is not a number of bytes")
    return FileDigest(sha256, size)


def check_config_file(record: Record, content: bytes) -> AdapterConfig | None:
    """Parse the config file; raise StoreDamaged unless it agrees with the manifest.

    Returns None for an adapter of an image model.
    """
    if record.modality == "image":
        if canonical_json(decode_json(content)) != canonical_json(record.manifest["config"]):
            raise StoreDamaged(f"{CONFIG_NAME} of {record.cid} is not that of its manifest.")
        return None
    try:
        config = parse_adapter_config(decode_json(content))
    except AdapterRefused as error:
        raise StoreDamaged(f"{CONFIG_NAME} of {record.cid} is broken: {error}") from error
    if canonical_json(config.canonical()) != canonical_json(record.manifest["config"]):
        raise StoreDamaged(f"{CONFIG_NAME} of {record.cid} does not match the manifest of its CID.")
    return config
