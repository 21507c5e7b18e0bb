from __future__ import annotations

import pytest

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.records import Content, Resolved
from loramux.registry.registry import Registry
from tests.registry_factory import make_cid, make_content


def push(registry: Registry, reference: str, seed: object) -> None:
    registry.push(reference, make_content(seed))


def push_digits(registry: Registry, reference: str, digits: str) -> str:
    cid = CID_PREFIX + digits.ljust(64, "0")
    registry.push(reference, Content(cid=cid, manifest={}, size_bytes=1))
    return cid


def test_a_version_means_its_bytes_and_no_alias(registry: Registry) -> None:
    push(registry, "alice/sql@1.4.2", 1)
    push(registry, "alice/sql@1.5.0", 2)
    assert registry.resolve("alice/sql@1.4.2") == Resolved(
        cid=make_cid(1), tenant="alice", name="sql", version="1.4.2", base_model="tiny"
    )


def test_a_name_alone_is_latest_until_something_is_in_production(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "alice/sql@2.0.0", 2)
    found = registry.resolve("alice/sql")
    assert (found.version, found.alias) == ("2.0.0", "latest")
    registry.promote("alice/sql", "1.0.0", alias="prod")
    found = registry.resolve("alice/sql")
    assert (found.version, found.alias) == ("1.0.0", "prod")
    # What is pushed next is not served by surprise.
    push(registry, "alice/sql@3.0.0", 3)
    assert registry.resolve("alice/sql").version == "1.0.0"
    assert registry.resolve("alice/sql@latest").version == "3.0.0"


def test_a_hotfix_of_an_older_line_does_not_become_latest(registry: Registry) -> None:
    for version in ("1.3.0", "1.4.0", "1.3.1", "1.5.0-rc.1"):
        push(registry, f"alice/sql@{version}", version)
    assert registry.resolve("alice/sql@latest").version == "1.4.0"


def test_a_bare_name_is_looked_for_at_home(registry: Registry) -> None:
    push(registry, "sql@1.0.0", 1)
    push(registry, "bob/sql@1.0.0", 2)
    assert registry.resolve("sql").tenant == "default"
    assert registry.resolve("sql", home_tenant="bob").cid == make_cid(2)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("alice/none", "No adapter alice/none"),
        ("alice/sql@9.9.9", r"no version 9\.9\.9; its latest is 1\.0\.0"),
        ("alice/sql@canary", "no alias canary; it has prod, latest"),
        (make_cid("nothing"), "No version in the registry"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    registry: Registry, reference: str, reason: str
) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    registry.promote("alice/sql", "1.0.0", alias="prod")
    with pytest.raises(AdapterNotFound, match=reason):
        registry.resolve(reference)


def test_a_split_sends_a_key_to_the_same_side_always(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "alice/sql@2.0.0", 2)
    registry.split("alice/sql", {"1.0.0": 50, "2.0.0": 50}, alias="prod")
    sides = {registry.resolve("alice/sql", sticky_key="user-7").version for _ in range(5)}
    assert len(sides) == 1
    by_key = {registry.resolve("alice/sql", sticky_key=str(i)).version for i in range(20)}
    by_chance = {registry.resolve("alice/sql").version for _ in range(60)}
    assert by_key == by_chance == {"1.0.0", "2.0.0"}


def test_a_content_id_or_the_start_of_one(registry: Registry) -> None:
    cid = push_digits(registry, "a/one@1.0.0", "aaaaaaaaaaaa1")
    push_digits(registry, "a/two@1.0.0", "aaaaaaaaaaaa2")
    assert registry.resolve(cid) == Resolved(cid=cid)
    assert registry.resolve("cidv1:sha256:aaaaaaaaaaaa1") == Resolved(cid=cid)
    assert registry.resolve("aaaaaaaaaaaa1") == Resolved(cid=cid)
    with pytest.raises(InvalidRequest, match="Several content ids"):
        registry.resolve("cidv1:sha256:aaaaaaaaaaaa")


def test_two_names_of_one_content_do_not_make_its_start_ambiguous(registry: Registry) -> None:
    cid = push_digits(registry, "a/one@1.0.0", "aaaaaaaaaaaa1")
    push_digits(registry, "b/one@1.0.0", "aaaaaaaaaaaa1")
    assert registry.resolve("aaaaaaaaaaaa").cid == cid


def test_a_content_whose_versions_were_all_removed_is_not_served(registry: Registry) -> None:
    push(registry, "alice/sql@1.0.0", 1)
    push(registry, "bob/sql@1.0.0", 1)
    registry.remove("alice/sql")
    assert registry.resolve(make_cid(1)).cid == make_cid(1)
    registry.remove("bob/sql@1.0.0")
    with pytest.raises(AdapterNotFound):
        registry.resolve(make_cid(1))
