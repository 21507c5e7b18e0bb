"""Digests of big files, computed once per version of the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from loramux.models.default_model import cache_folder


def file_digest(path: Path) -> str:
    """sha256 of the content. Remembered in the cache folder while path, size and mtime stay."""
    resolved = path.resolve()
    status = resolved.stat()
    version = {"path": str(resolved), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    key = hashlib.sha256(str(resolved).encode()).hexdigest()
    sidecar = cache_folder() / "digests" / f"{key}.json"
    remembered = read_sidecar(sidecar)
    if {name: remembered.get(name) for name in version} == version and "sha256" in remembered:
        return str(remembered["sha256"])
    with resolved.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A cache that cannot be written (read-only home) costs a new reading each time, no more.
    with contextlib.suppress(OSError):
        write_sidecar(sidecar, {**version, "sha256": digest})
    return digest


def model_digest(config_file: Path, weight_files: list[Path]) -> str:
    """Identity of a base: what its config and its weights hold, not where they are."""
    parts = [("config.json", hashlib.sha256(config_file.read_bytes()).hexdigest())]
    parts += [(path.name, file_digest(path)) for path in sorted(weight_files)]
    text = "".join(f"{digest}  {name}\n" for name, digest in parts)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def read_sidecar(sidecar: Path) -> dict[str, Any]:
    try:
        remembered = json.loads(sidecar.read_text())
    except (OSError, ValueError):
        return {}
    return remembered if isinstance(remembered, dict) else {}


def write_sidecar(sidecar: Path, content: dict[str, Any]) -> None:
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=sidecar.parent, prefix=".partial-")
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(partial, sidecar)
