"""The content id (CID) of an adapter: the digest of a manifest of its weights and its config.

All code that makes, reads or completes a CID does it through this module. It imports neither torch
nor the PEFT reader, so that every layer above it may use it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from loramux.base.canonical_json import canonical_json
from loramux.errors import InvalidRequest

FORMAT = "loramux-adapter/1"
CID_PREFIX = "cidv1:sha256:"
DIGEST_DIGITS = 64
MIN_DIGEST_DIGITS = 12
"""The shortest start of a digest that may be given instead of the whole."""

_DIGEST_START = re.compile(rf"[0-9a-f]{{{MIN_DIGEST_DIGITS},{DIGEST_DIGITS}}}", re.ASCII)

Manifest = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FileDigest:
    sha256: str
    size: int


def make_manifest(config: Mapping[str, object], files: Mapping[str, FileDigest]) -> Manifest:
    """Return the manifest of an adapter from the canonical form of its config and its files."""
    return {
        "format": FORMAT,
        "config": config,
        "files": {
            name: {"sha256": digest.sha256, "size": digest.size} for name, digest in files.items()
        },
    }


def compute_cid(manifest: Manifest) -> str:
    return CID_PREFIX + hashlib.sha256(canonical_json(manifest)).hexdigest()


def is_digest_start(text: str) -> bool:
    """Return whether the text is a SHA-256 in hexadecimal, or its first 12 or more digits."""
    return _DIGEST_START.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    return len(text) == DIGEST_DIGITS and is_digest_start(text)


def parse_cid(cid: str) -> str:
    """Return the digest of a complete CID; raise InvalidRequest for any other text."""
    digest = cid.removeprefix(CID_PREFIX)
    if not cid.startswith(CID_PREFIX) or not is_digest(digest):
        raise InvalidRequest(
            f"{cid[:100]!r} is not a content id. One looks like {CID_PREFIX}<64 hex digits>."
        )
    return digest


def parse_digest_start(text: str) -> str:
    """Return the digits of a CID that may be cut off, with its prefix or without.

    Raises InvalidRequest for any other text.
    """
    digits = text.removeprefix(CID_PREFIX)
    if not is_digest_start(digits):
        raise InvalidRequest(
            f"A content id is {CID_PREFIX} and {DIGEST_DIGITS} lower-case hex digits, or at least "
            f"the first {MIN_DIGEST_DIGITS} of them; found {digits[:100]!r}."
        )
    return digits
