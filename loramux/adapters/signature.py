"""Detached signatures of adapters: of the manifest, whose digest is the CID.

A signature is Base64 in the file `loramux.sig` of the adapter's folder, one for each line, or is
given with the push; a bundle of `cosign sign-blob --bundle` holds one too.
Ed25519 and ECDSA over P-256 with SHA-256 are known, so that `loramux sign`, `openssl` and
`cosign sign-blob --key` can make one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.base.canonical_json import canonical_json
from loramux.base.signing import KEY_ID_DIGITS
from loramux.errors import AdapterRefused, InvalidRequest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PublicKey = Ed25519PublicKey | EllipticCurvePublicKey

SIGNATURE_NAME = "loramux.sig"
MAX_SIGNATURES = 8
# Longer than any line of a signature of the known kinds.
MAX_CHARACTERS = 512
# A bundle also holds certificates and proofs of a log.
MAX_FILE_BYTES = 2**16
MAX_PEM_CHARACTERS = 4096
P256 = "secp256r1"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key whose signatures a tenant accepts."""

    key_id: str
    public_key: str
    """PEM."""
    name: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Verified:
    """A signature that one of the keys has made."""

    key_id: str
    signature: str


def signed_bytes(manifest: Mapping[str, object]) -> bytes:
    """Return what is signed: the manifest in canonical JSON, of which the CID is the digest."""
    return canonical_json(manifest)


def sign_manifest(manifest: Mapping[str, object], key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.sign(signed_bytes(manifest))).decode()


def read_signatures(folder: Path, name: str = SIGNATURE_NAME) -> tuple[str, ...]:
    """Return the signatures in an adapter's folder; none if it has no file of them."""
    path = folder / name
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _malformed(f"{name} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_FILE_BYTES:
        raise _malformed(f"{name} is larger than {MAX_FILE_BYTES} bytes.")
    return parse_signatures(content.decode("ascii", "replace"))


def parse_signatures(text: str) -> tuple[str, ...]:
    """Return the signatures of a text, one for each line, or the one of a bundle of Sigstore.

    Raises AdapterRefused.
    """
    if text.lstrip().startswith("{"):
        text = _signature_of_bundle(text)
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not 1 <= len(found) <= MAX_SIGNATURES:
        raise _malformed(f"1 to {MAX_SIGNATURES} signatures are expected, found {len(found)}.")
    for signature in found:
        if len(signature) > MAX_CHARACTERS or _decode(signature) is None:
            raise _malformed(f"{signature[:50]!r} is no signature in Base64.")
    return found


def find_verified(
    manifest: Mapping[str, object], signatures: Iterable[str], keys: Iterable[SigningKey]
) -> Verified | None:
    """Return the first of the signatures that one of the keys has made, or None."""
    message = signed_bytes(manifest)
    loaded = [(key.key_id, load_public_key(key.public_key)) for key in keys]
    for signature in signatures:
        for key_id, key in loaded:
            if _is_made_by(key, _decode(signature) or b"", message):
                return Verified(key_id, signature)
    return None


def parse_signing_key(pem: str, *, name: str = "") -> SigningKey:
    """Return the key of a PEM text in its usual form; raise InvalidRequest."""
    from cryptography.hazmat.primitives import serialization

    key = load_public_key(pem)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    text = key.public_bytes(serialization.Encoding.PEM, form).decode()
    return SigningKey(_key_id(key), text, name)


def load_public_key(pem: str) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem[:MAX_PEM_CHARACTERS].encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name == P256:
        return key
    raise InvalidRequest(
        "This is no public key in PEM format of Ed25519 or ECDSA P-256. Make a pair with "
        "`loramux receipts keygen FILE` or `cosign generate-key-pair`, and give the public one.",
        param="public_key",
    )


def _key_id(key: PublicKey) -> str:
    """Return the start of the SHA-256: of the 32 bytes of an Ed25519 key, else of its DER form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if isinstance(key, Ed25519PublicKey):
        content = key.public_bytes_raw()
    else:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        content = key.public_bytes(serialization.Encoding.DER, form)
    return hashlib.sha256(content).hexdigest()[:KEY_ID_DIGITS]


def _is_made_by(key: PublicKey, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _signature_of_bundle(text: str) -> str:
    """Return the signature of a message; keys and logs of the bundle are not used."""
    try:
        bundle = json.loads(text)
        message = bundle.get("messageSignature")
        found = bundle["base64Signature"] if message is None else message["signature"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise _malformed("This bundle holds no signature of a message.")
    return found


def _decode(signature: str) -> bytes | None:
    try:
        return base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return None


def _malformed(message: str) -> AdapterRefused:
    return AdapterRefused(
        "bad_signature",
        message,
        fix="Sign the adapter again: loramux sign FOLDER --key KEY.",
    )
