"""Copies an adapter folder into a staging folder, checks the copies and makes their record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.identity import FileDigest, make_manifest
from loramux.adapters.images.files import (
    DIFFUSERS_NAME,
    find_image_file,
    is_image_adapter,
    make_image_manifest,
    read_image_config,
)
from loramux.adapters.images.keys import Role, is_whole, split_key
from loramux.adapters.images.origin import declared_base, family_of_keys
from loramux.adapters.images.refusals import refuse_unserved
from loramux.adapters.peft.config import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    require_config,
)
from loramux.adapters.peft.folder import find_file, open_folder, refusing_os_errors
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    TensorEntry,
    find_weights,
    parse_header,
    read_head,
    read_metadata,
)
from loramux.adapters.peft.tokenizer_files import MAX_BYTES, find_tokenizer_files
from loramux.adapters.peft.types.configs import read_adapter_config
from loramux.base.progress import SILENT, ByteSink
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.store.files import copy_hashed, too_large
from loramux.store.record import Record, make_record
from loramux.store.values import check_finite
from loramux.types.modality import Modality

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
    base_model: str | None
    """The base that the adapter records."""
    paths: dict[str, Path]


def stage_folder(
    folder: Path,
    staging: Path,
    limits: StoreLimits,
    sink: ByteSink = SILENT,
    modality: Modality | None = None,
) -> StagedAdapter:
    """Copy the files of an adapter; raise AdapterNotFound or AdapterRefused.

    `modality`: what the adapter is for; None: its files tell.
    """
    if modality == "image" or (modality is None and is_image_adapter(folder)):
        return stage_image(folder, staging, limits, sink)
    source = open_folder(folder)
    # Checked before the weights are copied: most refusals need only the config and the header.
    read_adapter_config(source)
    weights = find_weights(source)
    size = check_size(weights, limits)
    check_header(weights)
    sink.begin("Storing", size)
    config_file = copy_config(source, staging)
    config = read_adapter_config(staging)
    weights_file, _ = copy_weights(weights, staging / WEIGHTS_NAME, limits, sink)
    files = {WEIGHTS_NAME: weights_file, **copy_tokenizer(source, staging)}
    record = make_record(make_manifest(config.canonical(), files), config_file)
    check_total(record, limits)
    paths = {name: staging / name for name in record.files}
    return StagedAdapter(record, config.base_model_name, paths)


def stage_image(
    place: Path, staging: Path, limits: StoreLimits, sink: ByteSink = SILENT
) -> StagedAdapter:
    """Copy the file of an adapter of an image model, and the config of a PEFT folder.

    Its modules are checked by the engine, which knows the pipeline.
    """
    place = place.resolve()
    if not place.exists():
        raise AdapterNotFound(f"There is no file or folder at {place}.")
    weights, config_path = find_image_file(place)
    inside = find_file(weights.parent, weights.name)
    if inside is None:
        raise AdapterNotFound(f"There is no file at {weights}.")
    size = check_size(inside, limits)
    check_header(inside)
    sink.begin("Storing", size)
    config, config_file = None, None
    if config_path is not None:
        config_file = copy_config(config_path.parent, staging)
        config = read_image_config(staging / CONFIG_NAME)
    # Its name follows from the manifest, which has its digest.
    copy = staging / (DIFFUSERS_NAME if not config else WEIGHTS_NAME)
    digest, entries = copy_weights(inside, copy, limits, sink)
    check_image_tensors(entries)
    record = make_record(make_image_manifest(digest, config), config_file if config else None)
    check_total(record, limits)
    with copy.open("rb") as file:
        metadata = read_metadata(read_head(file, digest.size))
    base = declared_base(metadata) or family_of_keys(entry.name for entry in entries)
    return StagedAdapter(record, base, {name: staging / name for name in record.files})


def check_image_tensors(entries: Sequence[TensorEntry]) -> None:
    """Refuses a file that has no pairs of low rank, or parts that are not served."""
    roles: dict[str, set[Role]] = {}
    for entry in entries:
        found = split_key(entry.name)
        if found is not None:
            refuse_unserved(entry.name, found[1])
            roles.setdefault(found[0], set()).add(found[1])
    if not any(is_whole(found) for found in roles.values()):
        shown = name_some([entry.name for entry in entries])
        raise AdapterRefused(
            RefusalCode.NO_TENSORS,
            f"The file has no LoRA matrices: {shown or 'it is empty'}.",
            fix="Give a LoRA file of diffusers, kohya, XLabs or ComfyUI, or a folder of PEFT.",
        )


def copy_config(source: Path, staging: Path) -> FileDigest:
    path = require_config(source)
    with refusing_os_errors(path):
        return copy_hashed(path, staging / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)


def copy_tokenizer(source: Path, staging: Path) -> dict[str, FileDigest]:
    """Copy the tokenizer files, if there are any, and returns their digests."""
    digests = {}
    for name, path in find_tokenizer_files(source).items():
        with refusing_os_errors(path):
            digests[name] = copy_hashed(path, staging / name, max_bytes=MAX_BYTES[name])
    return digests


def copy_weights(
    weights: Path, copy: Path, limits: StoreLimits, sink: ByteSink
) -> tuple[FileDigest, tuple[TensorEntry, ...]]:
    """Copy the weights, check the copy, and return its digest and its tensors."""
    with refusing_os_errors(weights):
        digest = copy_hashed(weights, copy, max_bytes=limits.max_file_bytes, sink=sink)
    return digest, check_header(copy, with_values=True)


def check_header(weights: Path, *, with_values: bool = False) -> tuple[TensorEntry, ...]:
    with refusing_os_errors(weights):
        file = weights.open("rb")
    with file, refusing_os_errors(weights):
        size = os.fstat(file.fileno()).st_size
        head = read_head(file, size)
        entries = parse_header(head[LENGTH_BYTES:], size - len(head))
        if with_values:
            check_finite(file, len(head), entries)
    return entries


def check_size(weights: Path, limits: StoreLimits) -> int:
    with refusing_os_errors(weights):
        size = weights.stat().st_size
    if size > limits.max_file_bytes:
        raise too_large(WEIGHTS_NAME, limits.max_file_bytes)
    return size


def check_total(record: Record, limits: StoreLimits) -> None:
    if any(digest.size > limits.max_file_bytes for digest in record.files.values()):
        raise too_large("A file of the adapter", limits.max_file_bytes)
    if record.size_bytes > limits.max_adapter_bytes:
        raise too_large("The adapter", limits.max_adapter_bytes)
