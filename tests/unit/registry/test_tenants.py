"""Limits of tenants and keys at push, their settings, and signatures, on both databases."""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import insert

from loramux.adapters.signature import sign_manifest, signed_bytes
from loramux.errors import AdapterRefused, InvalidRequest, QuotaExceeded, RecordNotFound
from loramux.registry.audit import Actor
from loramux.registry.records import Content
from loramux.registry.registry import Registry
from loramux.registry.schema import api_keys
from loramux.registry.tenants import SettingChanges, TenantInfo
from loramux.types.limits import Limits, TenantSettings
from tests.registry_factory import make_content

KEY = Ed25519PrivateKey.generate()
OTHER = Ed25519PrivateKey.generate()
COSIGN = ec.generate_private_key(ec.SECP256R1())


def pem(key: Any) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return str(public.decode())


def limit(registry: Registry, **limits: int | None) -> TenantInfo:
    return registry.tenants.set("acme", SettingChanges(limits=limits))


def refusal(push: Callable[[], object]) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as raised:
        push()
    return raised.value


def signed(content: Content, key: Ed25519PrivateKey) -> Content:
    return replace(content, signatures=(sign_manifest(content.manifest, key),))


def make_key(registry: Registry, key_id: str) -> None:
    values = {"key_id": key_id, "note": "", "salt": "", "digest": "", "scopes": ["push"]}
    with registry._database.writing() as connection:
        new = insert(api_keys).values(**values, may_use_base=True, created_at=0)
        connection.execute(new)


def test_settings_are_changed_one_by_one(registry: Registry) -> None:
    info = limit(registry, adapters=3, tokens_per_minute=1000)
    assert info.settings == TenantSettings(limits=Limits(adapters=3, tokens_per_minute=1000))
    registry.tenants.set("acme", SettingChanges(share=2.5, require_signed=True))
    info = limit(registry, adapters=None)
    expected = TenantSettings(limits=Limits(tokens_per_minute=1000), share=2.5, require_signed=True)
    assert registry.tenants.show("acme").settings == info.settings == expected
    assert registry.tenants.rate_limits() == ({"acme": expected}, {}, {})
    assert [one.name for one in registry.tenants.all()] == ["acme"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (SettingChanges(limits={"adapter": 1}), "no limit 'adapter'. Did you mean adapters"),
        (SettingChanges(limits={"adapters": -1}), "from 0 to"),
        (SettingChanges(limits={"adapters": True}), "whole number"),
        (SettingChanges(limits={"adapters": 2**53 + 1}), "whole number"),
        (SettingChanges(share=0), "share"),
        (SettingChanges(share=float("nan")), "share"),
    ],
)
def test_invalid_settings_change_nothing(
    registry: Registry, changes: SettingChanges, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        registry.tenants.set("acme", changes)
    assert registry.tenants.all() == []
    with pytest.raises(RecordNotFound):
        registry.tenants.show("acme")


def test_the_number_of_adapters_is_limited_and_not_that_of_versions(registry: Registry) -> None:
    limit(registry, adapters=2)
    for number, name in enumerate(("a", "b", "a", "b")):
        registry.push(f"acme/{name}", make_content(number))
    error = refusal(lambda: registry.push("acme/c", make_content(9)))
    assert error.code == "adapters"
    assert "The tenant acme may have 2 stored adapters, and 0 are left" in str(error)
    registry.push("globex/c", make_content(9))
    registry.remove("acme/a")
    registry.push("acme/c", make_content(9))


def test_stored_bytes_are_limited_and_shared_content_counts_once(registry: Registry) -> None:
    limit(registry, stored_bytes=250)
    registry.push("acme/a", make_content(1))
    registry.push("acme/b", make_content(1))
    registry.push("acme/a", make_content(2))
    error = refusal(lambda: registry.push("acme/a", make_content(3)))
    assert (error.code, registry.tenants.show("acme").stored_bytes) == ("stored_bytes", 200)
    assert "250 stored bytes, and 50 are left; this push needs 100" in str(error)
    registry.push("acme/c", make_content(2))


def test_a_lowered_limit_refuses_growth_only(registry: Registry) -> None:
    registry.push("acme/a@1.0.0", make_content(1))
    registry.push("acme/b@1.0.0", make_content(2))
    limit(registry, adapters=1, stored_bytes=1)
    assert registry.push("acme/a@1.0.0", make_content(1))[1] is False
    registry.push("acme/a@2.0.0", make_content(2))
    refusal(lambda: registry.push("acme/a", make_content(3)))
    refusal(lambda: registry.push("acme/c", make_content(1)))


def test_a_removed_version_comes_back_only_within_the_limits(registry: Registry) -> None:
    registry.push("acme/a@1.0.0", make_content(1))
    registry.push("acme/b@1.0.0", make_content(2))
    registry.remove("acme/b")
    limit(registry, adapters=1)
    refusal(lambda: registry.push("acme/b@1.0.0", make_content(2)))


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "rank_pattern": [["q_proj", 65]]},
        {"r": 65},
        {"init_r": 65, "ranks": [["q_proj", 8]]},
    ],
)
def test_the_rank_is_limited(registry: Registry, config: dict[str, Any]) -> None:
    content = make_content()
    content = replace(content, manifest={**content.manifest, "config": config})
    limit(registry, max_rank=65)
    registry.push("acme/a", content)
    limit(registry, max_rank=64)
    error = refusal(lambda: registry.push("acme/b", content))
    assert error.code == "max_rank" and "has rank 65" in str(error)


def test_a_key_has_limits_of_its_own(registry: Registry) -> None:
    make_key(registry, "k1")
    assert registry.tenants.set_key_limits("k1", {"adapters": 1}) == Limits(adapters=1)
    by_key = registry.acting(Actor("acme", "k1", ""))
    registry.push("acme/other", make_content(0))
    by_key.push("acme/a", make_content(1))
    assert "The API key k1" in str(refusal(lambda: by_key.push("acme/b", make_content(2))))
    registry.push("acme/b", make_content(2))
    assert registry.show("acme/a").versions[0].pushed_by == "k1"
    assert registry.show("acme/b").versions[0].pushed_by is None
    assert registry.tenants.rate_limits()[1] == {"k1": Limits(adapters=1)}
    with pytest.raises(RecordNotFound):
        registry.tenants.set_key_limits("k2", {"adapters": 1})


def test_concurrent_pushes_cannot_both_take_the_last_place(
    registry: Registry, open_registry: Callable[[], Registry]
) -> None:
    limit(registry, adapters=3)
    others, together = [open_registry() for _ in range(4)], Barrier(4)

    def push(number: int) -> int:
        together.wait()
        done = 0
        for step in range(3):
            try:
                others[number].push(f"acme/a{number}-{step}", make_content((number, step)))
                done += 1
            except QuotaExceeded:
                pass
        return done

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(push, range(4))) == 3
    assert len(registry.adapters()) == 3
    assert registry.audit.verify().faults == ()


def test_an_early_check_refuses_what_the_push_would_refuse(registry: Registry) -> None:
    limit(registry, adapters=1)
    registry.check_push("acme/a@1.0.0", make_content(1))
    registry.push("acme/a@1.0.0", make_content(1))
    registry.check_push("acme/a@1.0.0", make_content(1))
    refusal(lambda: registry.check_push("acme/b", make_content(2)))
    with pytest.raises(AdapterRefused, match="no signature"):
        registry.check_push("acme/a", make_content(2), require_signed=True)


def test_a_signature_of_a_registered_key_is_verified_and_recorded(registry: Registry) -> None:
    key = registry.tenants.add_signer("acme", pem(KEY), name="release")
    registry.tenants.add_signer("acme", pem(KEY))
    assert [(one.key_id, one.name) for one in registry.tenants.show("acme").signing_keys] == [
        (key.key_id, "release")
    ]
    registry.push("acme/a@1.0.0", signed(make_content(1), KEY), require_signed=True)
    assert registry.show("acme/a").versions[0].signed_by == key.key_id
    assert registry.resolve("acme/a").signed_by == key.key_id
    assert registry.audit.entries(limit=1)[0].entry.details["signed_by"] == key.key_id


def test_a_later_push_of_the_same_content_adds_its_signature(registry: Registry) -> None:
    key = registry.tenants.add_signer("acme", pem(KEY))
    registry.push("acme/a@1.0.0", make_content(1))
    assert registry.resolve("acme/a").signed_by is None
    registry.push("acme/a@1.0.0", signed(make_content(1), KEY))
    assert registry.resolve("acme/a").signed_by == key.key_id


def test_signatures_of_other_keys_contents_and_tenants_are_refused(registry: Registry) -> None:
    key = registry.tenants.add_signer("acme", pem(KEY))
    content = make_content(1)
    of_other_content = replace(content, signatures=signed(make_content(2), KEY).signatures)
    for reference, given in (
        ("acme/a", signed(content, OTHER)),
        ("acme/a", of_other_content),
        ("globex/a", signed(content, KEY)),
    ):
        with pytest.raises(AdapterRefused) as raised:
            registry.push(reference, given)
        assert raised.value.code == "bad_signature"
    registry.tenants.remove_signer("acme", key.key_id)
    with pytest.raises(AdapterRefused, match="it has none"):
        registry.push("acme/a", signed(content, KEY))
    with pytest.raises(RecordNotFound):
        registry.tenants.remove_signer("acme", key.key_id)
    assert registry.adapters() == []


def test_a_tenant_may_require_signatures(registry: Registry) -> None:
    registry.tenants.set("acme", SettingChanges(require_signed=True))
    registry.tenants.add_signer("acme", pem(KEY))
    with pytest.raises(AdapterRefused) as raised:
        registry.push("acme/a", make_content(1))
    assert raised.value.code == "unsigned"
    registry.push("acme/a", signed(make_content(1), KEY))
    registry.push("globex/a", make_content(1))


def test_a_signature_of_cosign_is_verified(registry: Registry) -> None:
    """`cosign sign-blob --key` makes ECDSA P-256 over SHA-256, in Base64."""
    key = registry.tenants.add_signer("acme", pem(COSIGN))
    content = make_content(1)
    signature = COSIGN.sign(signed_bytes(content.manifest), ec.ECDSA(hashes.SHA256()))
    text = base64.b64encode(signature).decode()
    registry.push("acme/a", replace(content, signatures=(text,)))
    assert registry.resolve("acme/a").signed_by == key.key_id


@pytest.mark.parametrize(
    "public_key",
    ["", "x", "-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n", "\0" * 9000],
)
def test_what_is_no_key_is_refused(registry: Registry, public_key: str) -> None:
    with pytest.raises(InvalidRequest, match="no public key"):
        registry.tenants.add_signer("acme", public_key)


def test_a_key_of_another_curve_is_refused(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match="P-256"):
        registry.tenants.add_signer("acme", pem(ec.generate_private_key(ec.SECP384R1())))
