"""What a receipt says about one answer, and how it is signed and checked."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loramux.canonical_json import canonical_json
from loramux.receipts.signing import key_id_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FORMAT = "loramux-receipt/1"
SIGNATURE = "signature"
SHORT_DIGEST_DIGITS = 7


class ServingStatus(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    """The engine or the adapter failed, or the request's time was over."""
    ABORTED = "aborted"
    """The client left before the end."""
    REFUSED = "refused"
    """It never ran: wrong, for something that is not here, or too much at once."""


class ServedAdapter(Struct, frozen=True, kw_only=True):
    """One adapter of the selection. Without a name: the request gave a content id."""

    cid: str
    weight: float = 1.0
    tenant: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None


class Receipt(Struct, frozen=True, kw_only=True):
    """The object that stands under `serving` in an answer. Times are measured in the server."""

    format: str = FORMAT
    id: str
    time: float
    """Arrival, in seconds since 1970."""
    tenant: str
    base_model: str
    base_digest: str
    adapter_cid: str | None
    """The first of `adapters`; None: the base answered."""
    adapters: tuple[ServedAdapter, ...] = ()
    pool_id: str
    tier_found: str | None = None
    """device, host, disk or source; None: no adapter was needed."""
    cold_miss: bool
    """The adapter was not on the device when the request came."""
    load_ms: float = 0.0
    queue_depth: int
    """Requests that waited when this one came."""
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    """None: there was no first token."""
    latency_ms: float
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    distinct_adapters: int = 0
    """In the batch that made the first token."""
    status: ServingStatus = ServingStatus.COMPLETED
    asked: str | UnsetType = UNSET
    """Of a refused request: what it named."""
    http_status: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    """Why it was refused, or failed."""
    key_id: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    """Base64 of the Ed25519 signature over the canonical JSON of all other fields."""

    def body(self) -> dict[str, Any]:
        """As JSON gives it back."""
        body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return body


class Verdict(StrEnum):
    VALID = "valid"
    UNSIGNED = "unsigned"
    OTHER_KEY = "other key"
    """Signed, but with another key than the one given."""
    CHANGED = "changed"
    """Not what the key's owner signed."""


def base_label(name: str, digest: str) -> str:
    """qwen2.5-7b-instruct@a1b2c3d"""
    return f"{name}@{digest.rpartition(':')[2][:SHORT_DIGEST_DIGITS]}"


def signed(receipt: Receipt, key: Ed25519PrivateKey) -> Receipt:
    """The receipt with the key's id and a signature over all of it."""
    named = msgspec.structs.replace(receipt, key_id=key_id_of(key.public_key()), signature=UNSET)
    return msgspec.structs.replace(named, signature=sign(named.body(), key))


def sign(body: Mapping[str, object], key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.sign(signed_bytes(body))).decode()


def verify(body: Mapping[str, object], signature: str, public_key: Ed25519PublicKey) -> bool:
    """Whether the key's owner signed this body; a signature inside the body does not count."""
    from cryptography.exceptions import InvalidSignature

    try:
        public_key.verify(base64.b64decode(signature, validate=True), signed_bytes(body))
    # What has no canonical form was never signed.
    except (InvalidSignature, binascii.Error, ValueError, TypeError, RecursionError):
        return False
    return True


def check(body: Mapping[str, object], public_key: Ed25519PublicKey) -> Verdict:
    """Of a receipt as it was given to a client, its signature inside."""
    signature = body.get(SIGNATURE)
    if not isinstance(signature, str):
        return Verdict.UNSIGNED
    if body.get("key_id") != key_id_of(public_key):
        return Verdict.OTHER_KEY
    return Verdict.VALID if verify(body, signature, public_key) else Verdict.CHANGED


def signed_bytes(body: Mapping[str, object]) -> bytes:
    return canonical_json({name: value for name, value in body.items() if name != SIGNATURE})
