"""SHA-256 digests of large files, cached by path, size and mtime."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loramux.models.default_model import cache_folder

_MAX_THREADS = 8


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, from the cache folder if path, size and mtime are the same."""
    resolved = path.resolve()
    version = file_version(resolved)
    remembered = read_sidecar(sidecar_of(resolved))
    if {name: remembered.get(name) for name in version} == version and "sha256" in remembered:
        return str(remembered["sha256"])
    with resolved.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    remember_digest(resolved, digest, version)
    return digest


def remember_digest(path: Path, digest: str, version: dict[str, Any] | None = None) -> None:
    """Keep the SHA-256 of a file for file_digest, as long as its path, size and mtime stay."""
    resolved = path.resolve()
    # If the cache is read-only, the file is hashed again next time.
    with contextlib.suppress(OSError):
        version = version or file_version(resolved)
        write_sidecar(sidecar_of(resolved), {**version, "sha256": digest})


def file_version(resolved: Path) -> dict[str, Any]:
    status = resolved.stat()
    return {"path": str(resolved), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def sidecar_of(resolved: Path) -> Path:
    key = hashlib.sha256(str(resolved).encode()).hexdigest()
    return cache_folder() / "digests" / f"{key}.json"


def model_digest(config_files: list[Path], weight_files: list[Path]) -> str:
    """Return the identity of a base: a digest of its configs and weights, not of their paths."""
    parts = [(one.name, hashlib.sha256(one.read_bytes()).hexdigest()) for one in config_files]
    files = sorted(weight_files)
    # Hashing releases the GIL.
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as threads:
        parts += zip((path.name for path in files), threads.map(file_digest, files), strict=True)
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
