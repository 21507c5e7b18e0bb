"""An adapter's identity: a digest of its weights file and of what its config means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from loramux.adapters.peft.config import PeftLoraConfig
from loramux.canonical_json import canonical_json

FORMAT = "loramux-adapter/1"
CID_PREFIX = "cidv1:sha256:"

Manifest = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FileDigest:
    sha256: str
    size: int


def make_manifest(config: PeftLoraConfig, files: Mapping[str, FileDigest]) -> Manifest:
    return {
        "format": FORMAT,
        "config": config.canonical(),
        "files": {
            name: {"sha256": digest.sha256, "size": digest.size} for name, digest in files.items()
        },
    }


def compute_cid(manifest: Manifest) -> str:
    return CID_PREFIX + hashlib.sha256(canonical_json(manifest)).hexdigest()
