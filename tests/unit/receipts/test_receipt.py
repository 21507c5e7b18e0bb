"""Signatures cover all fields of a receipt, and only signed receipts verify."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.receipts import receipt as receipts
from loramux.receipts.receipt import Receipt, Verdict, base_label, check, sign, signed, verify
from tests.receipt_factory import make_receipt

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
KOLM_FIELDS = {
    "base_model",
    "adapter_cid",
    "pool_id",
    "cold_miss",
    "queue_depth",
    "latency_ms",
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON value."""
    names: list[Any] = []
    if isinstance(value, dict):
        names = list(value)
    elif isinstance(value, list):
        names = list(range(len(value)))
    return [path] * bool(path) + [p for name in names for p in paths(value[name], (*path, name))]


SIGNED = signed(make_receipt(), KEY).body()
PATHS = [path for path in paths(SIGNED) if path != ("signature",)]


def copy_of(body: dict[str, Any]) -> Any:
    return json.loads(json.dumps(body))


def parent_of(body: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        body = body[name]
    return body


def test_the_receipt_has_kolms_names_and_no_signature_unless_it_was_signed() -> None:
    body = json.loads(msgspec.json.encode(make_receipt()))
    assert body.keys() >= KOLM_FIELDS
    assert not body.keys() & {"key_id", "signature"}
    assert body == make_receipt().body()


def test_a_signed_receipt_verifies_after_its_way_through_json() -> None:
    sent = msgspec.json.encode(signed(make_receipt(), KEY))
    assert check(json.loads(sent), PUBLIC) is Verdict.VALID
    assert check(json.loads(json.dumps(json.loads(sent), indent=3, sort_keys=True)), PUBLIC) == (
        Verdict.VALID
    )


@settings(max_examples=200)
@given(st.sampled_from(PATHS), values)
def test_any_changed_field_breaks_verification(path: tuple[Any, ...], value: Any) -> None:
    body = copy_of(SIGNED)
    parent = parent_of(body, path)
    old = parent[path[-1]]
    parent[path[-1]] = value
    is_same = value == old and isinstance(value, bool) == isinstance(old, bool)
    assert verify(body, SIGNED["signature"], PUBLIC) is is_same
    assert (check(body, PUBLIC) is Verdict.VALID) is is_same


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_missing_field_breaks_verification(path: tuple[Any, ...]) -> None:
    body = copy_of(SIGNED)
    del parent_of(body, path)[path[-1]]
    assert check(body, PUBLIC) is not Verdict.VALID


@given(st.text(st.characters(exclude_categories=["Cs"])), values)
def test_an_added_field_breaks_verification(name: str, value: Any) -> None:
    body = {**SIGNED, name: value}
    assert (check(body, PUBLIC) is Verdict.VALID) is (body == SIGNED)


@settings(max_examples=40)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=4))
def test_any_body_that_has_a_canonical_form_can_be_signed(body: dict[str, Any]) -> None:
    signature = sign(body, KEY)
    assert verify(dict(reversed(body.items())), signature, PUBLIC)
    assert not verify(body, signature, OTHER.public_key())


@pytest.mark.parametrize("signature", ["", "?", "AAAA", "ä", SIGNED["signature"][:-4]])
def test_an_invalid_signature_does_not_verify(signature: str) -> None:
    assert not verify(SIGNED, signature, PUBLIC)
    assert check({**SIGNED, "signature": signature}, PUBLIC) is Verdict.CHANGED


@pytest.mark.parametrize("value", [float("nan"), 2**60, "\ud800", {1: 2}, object()])
def test_a_body_without_a_canonical_form_does_not_verify(value: object) -> None:
    assert check({**SIGNED, "tenant": value}, PUBLIC) is Verdict.CHANGED


def test_the_verdict_tells_another_key_and_no_signature_from_a_change() -> None:
    assert check(SIGNED, OTHER.public_key()) is Verdict.OTHER_KEY
    assert check(make_receipt().body(), PUBLIC) is Verdict.UNSIGNED
    assert check({**SIGNED, "signature": 3}, PUBLIC) is Verdict.UNSIGNED
    assert check({**SIGNED, "latency_ms": 1}, PUBLIC) is Verdict.CHANGED


def test_a_signature_of_another_key_under_this_keys_id_does_not_verify() -> None:
    forged = {**SIGNED, "signature": sign(SIGNED, OTHER)}
    assert check(forged, PUBLIC) is Verdict.CHANGED


def test_signing_again_replaces_key_and_signature() -> None:
    again = signed(signed(make_receipt(), OTHER), KEY)
    assert again == signed(make_receipt(), KEY)


def test_the_receipt_of_a_base_answer_names_no_adapter() -> None:
    receipt = make_receipt(adapter_cid=None, adapters=(), tier_found=None, cold_miss=False)
    assert receipt.body()["adapter_cid"] is None
    assert msgspec.convert(receipt.body(), Receipt) == receipt


def test_the_label_of_a_base_has_the_start_of_its_digest() -> None:
    assert base_label("tiny", "sha256:a1b2c3d4e5f6") == "tiny@a1b2c3d"
    assert base_label("tiny", "a1b2c3d4e5f6") == "tiny@a1b2c3d"
    assert receipts.FORMAT in SIGNED.values()
