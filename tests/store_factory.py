"""Adapters of a few bytes, and a tier that records its calls."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMAGE_NAMES = (
    "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
    "transformer.transformer_blocks.0.attn.to_q.lora_B.weight",
)
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "tiny-llama",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def tiny_weights(seed: int, *, num_values: int = 4) -> bytes:
    """Return a valid safetensors file; another seed gives other content of the same size."""
    size = 4 * num_values
    entry = {"dtype": "F32", "shape": [num_values], "data_offsets": [0, size]}
    header = json.dumps({"lora_A": entry}).encode()
    values = struct.pack(f"<{num_values}f", *(float(seed + i) for i in range(num_values)))
    return struct.pack("<Q", len(header)) + header + values


def write_tiny(
    folder: Path, seed: int = 0, *, num_values: int = 4, config: Mapping[str, Any] = CONFIG
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(tiny_weights(seed, num_values=num_values))
    return folder


def image_weights(
    seed: int, *, names: Sequence[str] = IMAGE_NAMES, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a safetensors file as trainers of image adapters write it, with tiny matrices."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for index, name in enumerate(names):
        entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * index, 16 * index + 16]}
        entries[name] = entry
    header = json.dumps(entries).encode()
    values = struct.pack("<4f", *(float(seed + i) for i in range(4))) * len(names)
    return struct.pack("<Q", len(header)) + header + values


def write_image(path: Path, seed: int = 0, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_weights(seed, **content))
    return path


class FolderTier:
    """A RemoteTier in a folder that records its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str]] = []

    def path(self, key: str) -> Path:
        return self.folder / key

    def has(self, key: str) -> bool:
        self.calls.append(("has", key))
        return self.path(key).exists()

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        self.calls.append(("get", key))
        path = self.path(key)
        if not path.exists() or path.stat().st_size > max_bytes:
            return False
        destination.write_bytes(path.read_bytes())
        return True

    def put(self, key: str, source: Path) -> None:
        self.calls.append(("put", key))
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, self.path(key))

    def keys(self) -> set[str]:
        return {str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()}


def damage(path: Path) -> None:
    """Replace the content with the same size and time, as a bad disk would."""
    content, stat = path.read_bytes(), path.stat()
    path.chmod(0o644)
    path.write_bytes(bytes(255 - byte for byte in content))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
