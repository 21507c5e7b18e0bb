"""Reads and writes Ed25519 keys in PEM files; cryptography is imported on first use."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.errors import InvalidRequest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

KEY_ID_DIGITS = 16
PUBLIC_SUFFIX = ".pub"
# Far above the size of any key file.
MAX_KEY_BYTES = 2**16
PRIVATE_MODE, PUBLIC_MODE = 0o600, 0o644


def key_id_of(public_key: Ed25519PublicKey) -> str:
    """Return the id of a key: the first digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(public_key.public_bytes_raw()).hexdigest()[:KEY_ID_DIGITS]


def make_key_files(path: Path) -> str:
    """Write a new key to FILE and its public key to FILE.pub; return the key id."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public_path = public_key_path(path)
    for place in (path, public_path):
        if place.exists():
            raise InvalidRequest(f"{place} exists; a key is never overwritten. Name a new file.")
    public = public_pem(key.public_key()).encode()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_new(path, private, mode=PRIVATE_MODE)
    write_new(public_path, public, mode=PUBLIC_MODE)
    return key_id_of(key.public_key())


def public_pem(public_key: Ed25519PublicKey) -> str:
    from cryptography.hazmat.primitives import serialization

    return public_key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def public_key_path(path: Path) -> Path:
    return path.with_name(path.name + PUBLIC_SUFFIX)


def write_new(path: Path, content: bytes, *, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        message = f"{path} exists; a key is never overwritten. Name a new file."
        raise InvalidRequest(message) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_private_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    _check_mode(path.expanduser())
    try:
        key = load_pem_private_key(read_pem(path), password=None)
    # Raised without its cause, which may quote the file.
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise not_a_key(path, "private") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise not_a_key(path, "private")
    return key


def _check_mode(path: Path) -> None:
    """Refuses a key that other users may replace."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(
            f"Other users may change the key {path} (mode {mode:04o}). Run: chmod 600 {path}"
        )


def read_public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_pem(path))
    except (ValueError, UnsupportedAlgorithm):
        raise not_a_key(path, "public") from None
    if not isinstance(key, Ed25519PublicKey):
        raise not_a_key(path, "public")
    return key


def read_pem(path: Path) -> bytes:
    with path.expanduser().open("rb") as file:
        return file.read(MAX_KEY_BYTES)


def not_a_key(path: Path, kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} does not hold an unencrypted {kind} Ed25519 key in PEM format. "
        "Make a pair with `loramux receipts keygen FILE`."
    )
