"""The receipt of one response, its signature and its verification."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loramux.base.canonical_json import canonical_json
from loramux.base.signing import key_id_of

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
    """The engine or the adapter failed, or the request timed out."""
    ABORTED = "aborted"
    """The client disconnected before the end."""
    REFUSED = "refused"
    """The request did not run: it was invalid, named an unknown model, or exceeded a limit."""


class ServedAdapter(Struct, frozen=True, kw_only=True):
    """One adapter of the selection; it has no name if the request gave a CID."""

    cid: str
    weight: float = 1.0
    tenant: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None
    signed_by: str | UnsetType = UNSET
    """The id of the key whose signature was verified when the version was pushed."""
    part_of: str | UnsetType = UNSET
    """tenant/name@version of the sum in the registry that named this adapter."""
    recipe_cid: str | UnsetType = UNSET
    """The CID of that sum, or of the recipe of which this adapter was made."""
    recipe: dict[str, Any] | UnsetType = UNSET
    """Method, parts and parameters of a combined adapter that is a version of the registry."""


class ServedImage(Struct, frozen=True, kw_only=True):
    """One image of a response; with the adapters of the receipt it can be drawn again."""

    seed: int
    size: str
    """WIDTHxHEIGHT"""
    steps: int
    pixel_digest: str
    """sha256 over the size and the pixels as bytes, whatever the encoding."""
    num_pauses: int = 0
    """How often other images took its place between two steps."""


class Receipt(Struct, frozen=True, kw_only=True):
    """The object under `serving` in a response. Times are measured in the server."""

    format: str = FORMAT
    id: str
    time: float
    """The time of arrival in seconds since 1970."""
    tenant: str
    api_key_id: str | UnsetType = UNSET
    """The id of the API key of the request, if it had one."""
    base_model: str
    base_digest: str
    adapter_cid: str | None
    """The CID of the first of `adapters` with a weight; None if the base alone answered."""
    adapters: tuple[ServedAdapter, ...] = ()
    """All adapters that the request named, in its order, also those of weight 0."""
    combination: dict[str, Any] | UnsetType = UNSET
    """The recipe, if `adapter_cid` is a combination of `adapters` other than their sum."""
    pool_id: str
    tier_found: str | None = None
    """device, host, disk or source; None if no adapter was needed."""
    cold_miss: bool
    """Whether the adapter was not on the device when the request arrived."""
    load_ms: float = 0.0
    queue_depth: int
    """The number of waiting requests at the arrival of this one."""
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    """The time to the first token; None if there was none."""
    latency_ms: float
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    """The number of prompt tokens from the prefix cache."""
    distinct_adapters: int = 0
    """The number of distinct adapters in the batch that produced the first token."""
    prompt_digests: tuple[str, ...] | UnsetType = UNSET
    """A digest of the token ids of each prompt, as the model read it (`receipts/digests.py`)."""
    answer_digests: tuple[str, ...] | UnsetType = UNSET
    """A digest of the token ids of each answer, by the index of its choice."""
    images: tuple[ServedImage, ...] | UnsetType = UNSET
    """The images of a request for images; `completion_tokens` are then image tokens times steps."""
    status: ServingStatus = ServingStatus.COMPLETED
    asked: str | UnsetType = UNSET
    """The model that a refused request named."""
    http_status: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    """The reason of a refusal or failure."""
    key_id: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    """The Ed25519 signature of the canonical JSON of all other fields, in Base64."""

    def body(self) -> dict[str, Any]:
        """Return the receipt as decoded JSON."""
        body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return body


class Verdict(StrEnum):
    VALID = "valid"
    UNSIGNED = "unsigned"
    OTHER_KEY = "other key"
    """The receipt is signed with a different key."""
    CHANGED = "changed"
    """The receipt was changed after it was signed."""
    OTHER_TOKENS = "other tokens"
    """The receipt is valid, and does not sign the prompt or the answer that is shown with it."""


def base_label(name: str, digest: str) -> str:
    """Return a label such as qwen2.5-7b-instruct@a1b2c3d."""
    return f"{name}@{digest.rpartition(':')[2][:SHORT_DIGEST_DIGITS]}"


def signed(receipt: Receipt, key: Ed25519PrivateKey) -> Receipt:
    """Return the receipt with the id of the key and a signature of all fields."""
    named = msgspec.structs.replace(receipt, key_id=key_id_of(key.public_key()), signature=UNSET)
    return msgspec.structs.replace(named, signature=sign(named.body(), key))


def sign(body: Mapping[str, object], key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.sign(signed_bytes(body))).decode()


def verify(body: Mapping[str, object], signature: str, public_key: Ed25519PublicKey) -> bool:
    """Return whether the signature is valid for this body without its own signature field."""
    from cryptography.exceptions import InvalidSignature

    try:
        public_key.verify(base64.b64decode(signature, validate=True), signed_bytes(body))
    # A body without a canonical form cannot have been signed.
    except (InvalidSignature, binascii.Error, ValueError, TypeError, RecursionError):
        return False
    return True


def check(body: Mapping[str, object], public_key: Ed25519PublicKey) -> Verdict:
    """Verify a receipt that contains its signature."""
    signature = body.get(SIGNATURE)
    if not isinstance(signature, str):
        return Verdict.UNSIGNED
    if body.get("key_id") != key_id_of(public_key):
        return Verdict.OTHER_KEY
    return Verdict.VALID if verify(body, signature, public_key) else Verdict.CHANGED


def signed_bytes(body: Mapping[str, object]) -> bytes:
    return canonical_json({name: value for name, value in body.items() if name != SIGNATURE})
