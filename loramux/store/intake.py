"""Copies an adapter folder into a staging folder, checks the copies and makes their record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.identity import FileDigest, make_manifest
from loramux.adapters.peft.config import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
)
from loramux.adapters.peft.folder import find_file, open_folder, refusing_os_errors
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    find_weights,
    parse_header,
    read_head,
)
from loramux.adapters.peft.tokenizer_files import MAX_BYTES, find_tokenizer_files
from loramux.adapters.peft.types.configs import AdapterConfig, read_adapter_config
from loramux.progress import SILENT, ByteSink
from loramux.store.files import copy_hashed, too_large
from loramux.store.record import Record, make_record
from loramux.store.values import check_finite

GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    max_file_bytes: int = 8 * GIBIBYTE
    max_adapter_bytes: int = 8 * GIBIBYTE
    max_store_bytes: int | None = None
    """The limit for all files together; None means the size of the disk."""


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """Checked copies of an adapter's files, in a folder that no other process writes to."""

    record: Record
    config: AdapterConfig
    paths: dict[str, Path]


def stage_folder(
    folder: Path, staging: Path, limits: StoreLimits, sink: ByteSink = SILENT
) -> StagedAdapter:
    """Copies the files of an adapter; raises AdapterNotFound or AdapterRefused."""
    source = open_folder(folder)
    # Checked before the weights are copied: most refusals need only the config and the header.
    read_adapter_config(source)
    weights = find_weights(source)
    check_size(weights, limits)
    check_header(weights)
    sink.begin("Storing", weights.stat().st_size)
    config_file = copy_config(source, staging)
    config = read_adapter_config(staging)
    weights_file = copy_weights(weights, staging, limits, sink)
    files = {WEIGHTS_NAME: weights_file, **copy_tokenizer(source, staging)}
    record = make_record(make_manifest(config.canonical(), files), config_file)
    check_total(record, limits)
    return StagedAdapter(record, config, {name: staging / name for name in record.files})


def copy_config(source: Path, staging: Path) -> FileDigest:
    path = find_file(source, CONFIG_NAME)
    assert path is not None, "read_adapter_config has found it"
    with refusing_os_errors(path):
        return copy_hashed(path, staging / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)


def copy_tokenizer(source: Path, staging: Path) -> dict[str, FileDigest]:
    """Copies the tokenizer files, if there are any, and returns their digests."""
    digests = {}
    for name, path in find_tokenizer_files(source).items():
        with refusing_os_errors(path):
            digests[name] = copy_hashed(path, staging / name, max_bytes=MAX_BYTES[name])
    return digests


def copy_weights(weights: Path, staging: Path, limits: StoreLimits, sink: ByteSink) -> FileDigest:
    copy = staging / WEIGHTS_NAME
    with refusing_os_errors(weights):
        digest = copy_hashed(weights, copy, max_bytes=limits.max_file_bytes, sink=sink)
    check_header(copy, with_values=True)
    return digest


def check_header(weights: Path, *, with_values: bool = False) -> None:
    with refusing_os_errors(weights):
        file = weights.open("rb")
    with file, refusing_os_errors(weights):
        size = os.fstat(file.fileno()).st_size
        head = read_head(file, size)
        entries = parse_header(head[LENGTH_BYTES:], size - len(head))
        if with_values:
            check_finite(file, len(head), entries)


def check_size(weights: Path, limits: StoreLimits) -> None:
    with refusing_os_errors(weights):
        if weights.stat().st_size > limits.max_file_bytes:
            raise too_large(WEIGHTS_NAME, limits.max_file_bytes)


def check_total(record: Record, limits: StoreLimits) -> None:
    if any(digest.size > limits.max_file_bytes for digest in record.files.values()):
        raise too_large("A file of the adapter", limits.max_file_bytes)
    if record.size_bytes > limits.max_adapter_bytes:
        raise too_large("The adapter", limits.max_adapter_bytes)
