"""Copies an adapter folder into a staging folder, checks the copies and makes their record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.identity import FileDigest, make_manifest
from loramux.adapters.peft.config import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    PeftLoraConfig,
    read_config,
)
from loramux.adapters.peft.folder import find_file, open_folder, refusing_os_errors
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    find_weights,
    parse_header,
    read_head,
)
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
    config: PeftLoraConfig
    paths: dict[str, Path]


def stage_folder(
    folder: Path, staging: Path, limits: StoreLimits, sink: ByteSink = SILENT
) -> StagedAdapter:
    """Copies the two files of an adapter; raises AdapterNotFound or AdapterRefused."""
    source = open_folder(folder)
    # Checked before the weights are copied: most refusals need only the config and the header.
    read_config(source)
    weights = find_weights(source)
    check_size(weights, limits)
    check_header(weights)
    sink.begin("Storing", weights.stat().st_size)
    config_file = copy_config(source, staging)
    config = read_config(staging)
    weights_file = copy_weights(weights, staging, limits, sink)
    record = make_record(
        make_manifest(config.canonical(), {WEIGHTS_NAME: weights_file}), config_file
    )
    check_total(record, limits)
    return StagedAdapter(record, config, {name: staging / name for name in record.files})


def copy_config(source: Path, staging: Path) -> FileDigest:
    path = find_file(source, CONFIG_NAME)
    assert path is not None, "read_config has found it"
    with refusing_os_errors(path):
        return copy_hashed(path, staging / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)


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
