"""Keys, shares and fair shares in the registry, on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loramux.errors import AdapterNotFound, InvalidRequest, QuotaExceeded, RecordNotFound
from loramux.registry.keys import KeyRights, make_key, matches, parse_key
from loramux.registry.names import AdapterName, CidReference, parse_reference
from loramux.registry.records import Share
from loramux.registry.registry import Registry
from loramux.types.access import ALL_SCOPES, KeyScope
from tests.registry_factory import make_content

SQL = AdapterName("acme", "sql")
RIGHTS = KeyRights(
    tenant="acme",
    scopes=frozenset({KeyScope.INFER, KeyScope.PUSH}),
    adapters=("acme/sql*",),
    may_use_base=False,
)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(empty_url: str, clock: Clock) -> Iterator[Registry]:
    with Registry(empty_url, clock=clock) as opened:
        yield opened


def test_a_key_opens_by_its_text_alone_and_the_text_is_not_stored(registry: Registry) -> None:
    new = registry.access.create_key(RIGHTS, note="ci", expires_in_s=60)
    [stored] = registry.access.snapshot().keys.values()
    assert stored == new.record and stored.rights == RIGHTS
    key_id, secret = parse_key(new.text) or ("", "")
    assert key_id == stored.key_id and secret not in repr(stored) + repr(new)
    assert secret not in (stored.salt, stored.digest)
    assert stored.opens(secret, now=Clock.now) and not stored.opens(secret, now=Clock.now + 60)
    assert not stored.opens(secret[:-1] + ("A" if secret[-1] != "A" else "B"), now=Clock.now)


def test_a_revoked_key_stays_listed_and_opens_nothing(registry: Registry, clock: Clock) -> None:
    new = registry.access.create_key(RIGHTS)
    registry.access.revoke_key(new.record.key_id)
    [found] = registry.access.keys(tenant="acme")
    assert not found.is_valid(clock.now)
    with pytest.raises(RecordNotFound, match="no valid key"):
        registry.access.revoke_key(new.record.key_id)


def test_a_rotated_key_has_the_same_rights_and_the_old_one_ends(
    registry: Registry, clock: Clock
) -> None:
    old = registry.access.create_key(RIGHTS, note="ci", expires_in_s=100)
    clock.now += 10
    new = registry.access.rotate_key(old.record.key_id, overlap_s=20)
    assert new.record.rights == RIGHTS and new.record.note == "ci" and new.text != old.text
    assert new.record.expires_at == clock.now + 100
    keys = registry.access.snapshot().keys
    assert keys[new.record.key_id] == new.record
    assert keys[old.record.key_id].is_valid(clock.now + 19)
    assert not keys[old.record.key_id].is_valid(clock.now + 21)


@pytest.mark.parametrize("seconds", [1e308, float("inf"), float("nan"), 0.0, -1.0])
def test_times_without_bounds_are_refused(registry: Registry, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        registry.access.create_key(RIGHTS, expires_in_s=seconds)
    key_id = registry.access.create_key(RIGHTS).record.key_id
    if seconds != 0:
        with pytest.raises(InvalidRequest, match="seconds"):
            registry.access.rotate_key(key_id, overlap_s=seconds)
    (key,) = registry.access.keys()
    assert key.ends_at is None


def test_a_tenant_has_a_limited_number_of_keys(
    registry: Registry, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.registry.access.MAX_KEYS_OF_TENANT", 3)
    access, other = registry.access, replace(RIGHTS, tenant="globex")
    keys = [access.create_key(RIGHTS).record.key_id for _ in range(2)]
    keys.append(access.create_key(RIGHTS, expires_in_s=60).record.key_id)
    with pytest.raises(QuotaExceeded, match="3 valid keys"):
        access.create_key(RIGHTS)
    access.create_key(other), access.create_key(replace(RIGHTS, tenant=None))
    # A rotation replaces a key, unless both are to be valid.
    keys[0] = access.rotate_key(keys[0]).record.key_id
    with pytest.raises(QuotaExceeded):
        access.rotate_key(keys[1], overlap_s=60)
    assert {key.key_id for key in access.keys(tenant="acme") if key.is_valid(clock.now)} == {*keys}
    clock.now += 61
    access.create_key(RIGHTS)
    # Of ended keys the newest stay; the limit holds for them too.
    for _ in range(9):
        clock.now += 1
        keys[0] = access.rotate_key(keys[0]).record.key_id
    found = access.keys(tenant="acme")
    assert len([key for key in found if not key.is_valid(clock.now)]) <= 4
    assert len([key for key in found if key.is_valid(clock.now)]) == 3


def test_rotations_share_the_bucket_of_the_first_key(registry: Registry) -> None:
    first = registry.access.create_key(RIGHTS, limits={"requests_per_minute": 2}).record.key_id
    second = registry.access.rotate_key(first).record.key_id
    third = registry.access.rotate_key(second, overlap_s=5).record.key_id
    _, limits, buckets = registry.tenants.rate_limits()
    assert buckets == {second: first, third: first}
    assert {limits[key].requests_per_minute for key in (first, second, third)} == {2}


def test_a_key_may_be_bound_to_no_tenant(registry: Registry) -> None:
    rights = KeyRights(tenant=None, scopes=ALL_SCOPES)
    registry.access.create_key(rights)
    [found] = registry.access.keys()
    assert found.rights == rights


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHTS, tenant="a b"),
        replace(RIGHTS, scopes=frozenset()),
        replace(RIGHTS, adapters=("a\nb",)),
        replace(RIGHTS, adapters=("a",) * 101),
    ],
)
def test_rights_that_cannot_be_meant_are_refused(wrong: KeyRights) -> None:
    with pytest.raises(InvalidRequest):
        make_key(wrong, now=0)


@pytest.mark.parametrize("text", ["", "lmx_", "lmx_0123_x", "sk-" + "a" * 60, "x" * 10_000])
def test_other_texts_are_no_keys(text: str) -> None:
    assert parse_key(text) is None


def test_patterns_match_full_names_and_bare_ones() -> None:
    assert matches(None, "acme/sql", "sql")
    assert matches(["acme/*"], "acme/sql", "sql") and matches(["s*"], "acme/sql", "sql")
    assert not matches(["acme/*"], "globex/sql", "sql") and not matches([], "acme/sql", "sql")


def test_a_share_is_for_a_tenant_and_a_version(registry: Registry) -> None:
    registry.push("acme/sql@1.0.0", make_content())
    access = registry.access
    access.share(SQL, "globex", "1.0.0")
    found = access.snapshot()
    assert found.is_shared(SQL, "globex", "1.0.0") and not found.is_shared(SQL, "globex", "1.0.1")
    assert not found.is_shared(SQL, "globex", None) and not found.is_shared(SQL, "x", "1.0.0")
    access.share(SQL, "*")
    access.share(SQL, "*")
    assert access.shares(SQL) == [Share(SQL, "*", ""), Share(SQL, "globex", "1.0.0")]
    assert access.snapshot().is_shared(SQL, "x", None)
    access.unshare(SQL, "*")
    access.unshare(SQL, "globex")
    assert access.shares(SQL) == []
    with pytest.raises(AdapterNotFound, match="does not exist"):
        access.unshare(SQL, "globex")


def test_what_does_not_exist_is_not_shared(registry: Registry) -> None:
    with pytest.raises(AdapterNotFound):
        registry.access.share(SQL, "globex")
    registry.push("acme/sql@1.0.0", make_content())
    with pytest.raises(AdapterNotFound):
        registry.access.share(SQL, "globex", "2.0.0")
    with pytest.raises(InvalidRequest, match="belongs to acme"):
        registry.access.share(SQL, "acme")


def test_shares_end_with_their_adapter(registry: Registry) -> None:
    registry.push("acme/sql@1.0.0", make_content())
    registry.access.share(SQL, "globex")
    registry.remove("acme/sql")
    assert registry.access.snapshot().shares == {}


def test_fair_shares_are_those_of_the_tenant_records(registry: Registry) -> None:
    registry.access.set_fair_share("acme", 2.5)
    registry.access.set_fair_share("globex", 1)
    assert registry.access.snapshot().fair_shares == {"acme": 2.5}
    with pytest.raises(InvalidRequest):
        registry.access.set_fair_share("acme", 0)


def test_the_watch_tells_of_changed_access(empty_url: str) -> None:
    changed = threading.Event()
    with (
        Registry(empty_url) as registry,
        Registry(empty_url) as other,
        registry.watch(poll_s=0.01, on_access=changed.set),
    ):
        other.access.create_key(RIGHTS)
        assert changed.wait(10)


def test_a_content_id_is_found_among_own_and_shared_versions(registry: Registry) -> None:
    content = make_content(1)
    for reference in ("acme/sql@1.0.0", "globex/copy@2.0.0", "umbrella/same@1.0.0"):
        registry.push(reference, content)
    registry.push("acme/sql@1.1.0", make_content(2))
    whole, start = parse_reference(content.cid), parse_reference(content.cid[:-40])
    assert isinstance(whole, CidReference) and isinstance(start, CidReference)

    def found(tenant: str | None, reference: CidReference = whole) -> list[str]:
        return [f"{name}@{one.version}" for name, one in registry.find_cid(reference, tenant)]

    assert found("acme") == found("acme", start) == ["acme/sql@1.0.0"]
    assert found("other") == []
    assert len(found(None)) == 3
    registry.access.share(SQL, "other", "1.1.0")
    assert found("other") == []
    registry.access.share(SQL, "other", "1.0.0")
    registry.access.share(AdapterName("globex", "copy"), "*")
    assert found("other") == ["acme/sql@1.0.0", "globex/copy@2.0.0"]
    registry.remove("acme/sql@1.0.0")
    assert found("other") == ["globex/copy@2.0.0"] and found("acme") == ["globex/copy@2.0.0"]
