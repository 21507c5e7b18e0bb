"""The public methods of the registry, also with concurrent writers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from loramux.errors import AdapterNotFound, InvalidRequest, RegistryConflict
from loramux.registry.names import AdapterName
from loramux.registry.records import AliasAction, Content, Target
from loramux.registry.registry import Registry
from tests.registry_factory import FakeClock, make_cid, make_content

NUM_WRITERS = 4


def test_from_push_to_rollback(registry: Registry, clock: FakeClock) -> None:
    registry.push("alice/sql@1.0.0", make_content(1))
    clock.advance(60.0)
    registry.push("alice/sql@1.1.0", make_content(2))
    registry.promote("alice/sql", "1.0.0", alias="prod")
    registry.promote("alice/sql", "1.1.0", alias="prod")
    assert registry.resolve("alice/sql@prod").cid == make_cid(2)
    registry.rollback("alice/sql", alias="prod")
    assert registry.resolve("alice/sql@prod").cid == make_cid(1)
    shown = registry.show("alice/sql")
    assert (shown.latest, [info.version for info in shown.versions]) == (
        "1.1.0",
        ["1.1.0", "1.0.0"],
    )
    assert [(state.alias, state.revision) for state in shown.aliases] == [("prod", 3)]
    assert shown.versions[0].created_at - shown.versions[1].created_at == 60.0
    actions = [state.action for state in registry.history("alice/sql", alias="prod")]
    assert actions == [AliasAction.ROLLBACK, AliasAction.PROMOTE, AliasAction.PROMOTE]
    assert registry.verify() == ()


def test_two_tenants_with_the_same_bytes_share_one_content(registry: Registry) -> None:
    for tenant in ("alice", "bob"):
        registry.push(f"{tenant}/sql@1.0.0", make_content("same"))
    assert registry.cids() == {make_cid("same")}
    assert [str(name) for name, _ in registry.names_of(make_cid("same"))] == [
        "alice/sql",
        "bob/sql",
    ]
    assert registry.manifest(make_cid("same")) == make_content("same").manifest
    with pytest.raises(AdapterNotFound):
        registry.manifest(make_cid("none"))


def test_receipts_of_removed_versions_can_still_be_found(registry: Registry) -> None:
    registry.push("a/b@1.0.0", make_content(1))
    registry.push("a/b@2.0.0", make_content(2))
    registry.push("a/other@1.0.0", make_content(3))
    registry.remove("a/b@1.0.0")
    assert registry.cids_of("a/b") == {make_cid(1), make_cid(2)}
    registry.remove("a/b")
    assert registry.cids_of("a/b") == {make_cid(1), make_cid(2)}
    with pytest.raises(AdapterNotFound):
        registry.cids_of("a/never")


def test_tenants_are_listed_apart(registry: Registry) -> None:
    registry.push("alice/sql@1.0.0", make_content(1))
    registry.push("chat@1.0.0", make_content(2))
    assert registry.adapters(tenant="alice") == [AdapterName("alice", "sql")]
    assert registry.adapters() == [AdapterName("alice", "sql"), AdapterName("default", "chat")]


def test_one_alias_can_be_removed(registry: Registry) -> None:
    registry.push("alice/sql@1.0.0", make_content(1))
    registry.promote("alice/sql", "1.0.0", alias="canary")
    registry.remove("alice/sql@canary")
    with pytest.raises(AdapterNotFound, match="no alias canary"):
        registry.resolve("alice/sql@canary")
    assert registry.resolve("alice/sql").version == "1.0.0"


@pytest.mark.parametrize(
    "act",
    [
        lambda registry: registry.push("a/b@prod", make_content(1)),
        lambda registry: registry.push("../b@1.0.0", make_content(1)),
        lambda registry: registry.push(
            "a/b@2.0.0", Content(cid="cidv1:sha256:zz", manifest={}, size_bytes=0)
        ),
        lambda registry: registry.promote("a/b", "1.0.0", alias="latest"),
        lambda registry: registry.promote("a/b", "one", alias="prod"),
        lambda registry: registry.promote("a/b@1.0.0", "1.0.0", alias="prod"),
        lambda registry: registry.split("a/b", {}, alias="prod"),
        lambda registry: registry.split("a/b", {"1.0.0": 0}, alias="prod"),
        lambda registry: registry.remove("a/b@latest"),
        lambda registry: registry.remove("cidv1:sha256:" + "0" * 64),
        lambda registry: registry.rollback("a/b", alias="PROD"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(
    registry: Registry, act: Callable[[Registry], object]
) -> None:
    registry.push("a/b@1.0.0", make_content(0))
    before = registry.show("a/b")
    with pytest.raises(InvalidRequest):
        act(registry)
    assert registry.show("a/b") == before
    assert registry.adapters() == [AdapterName("a", "b")]


def test_a_push_that_is_refused_leaves_no_trace_of_its_adapter(registry: Registry) -> None:
    registry.push("a/b@1.0.0", make_content(1))
    with pytest.raises(RegistryConflict):
        registry.push("a/b@1.0.0", make_content(2))
    assert registry.cids() == {make_cid(1)}
    with pytest.raises(AdapterNotFound):
        registry.manifest(make_cid(2))


def race(
    open_registry: Callable[[], Registry], act: Callable[[Registry, int], object]
) -> list[object]:
    """Return the result or the conflict of each writer."""
    registries = [open_registry() for _ in range(NUM_WRITERS)]
    together = Barrier(NUM_WRITERS)

    def run(number: int) -> object:
        together.wait()
        try:
            return act(registries[number], number)
        except RegistryConflict as conflict:
            return conflict

    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        return list(threads.map(run, range(NUM_WRITERS)))


def test_of_writers_that_push_one_version_with_other_bytes_one_wins(
    open_registry: Callable[[], Registry],
) -> None:
    results = race(
        open_registry, lambda registry, number: registry.push("a/b@1.0.0", make_content(number))
    )
    winners = [n for n, result in enumerate(results) if not isinstance(result, RegistryConflict)]
    assert len(winners) == 1
    assert open_registry().resolve("a/b").cid == make_cid(winners[0])


def test_writers_without_a_number_get_one_each(open_registry: Callable[[], Registry]) -> None:
    race(open_registry, lambda registry, number: registry.push("a/b", make_content(number)))
    registry = open_registry()
    assert [info.version for info in registry.show("a/b").versions] == [
        "1.0.3",
        "1.0.2",
        "1.0.1",
        "1.0.0",
    ]
    assert registry.verify() == ()


def test_of_writers_that_saw_the_same_state_of_an_alias_one_moves_it(
    open_registry: Callable[[], Registry],
) -> None:
    registry = open_registry()
    for number in range(NUM_WRITERS):
        registry.push(f"a/b@{number}.0.0", make_content(number))
    results = race(
        open_registry,
        lambda writer, number: writer.promote("a/b", f"{number}.0.0", alias="prod", if_revision=0),
    )
    assert sum(isinstance(result, RegistryConflict) for result in results) == NUM_WRITERS - 1
    assert len(registry.history("a/b", alias="prod")) == 1


def test_moves_without_a_condition_all_happen_in_some_order(
    open_registry: Callable[[], Registry],
) -> None:
    registry = open_registry()
    for number in range(NUM_WRITERS):
        registry.push(f"a/b@{number}.0.0", make_content(number))
    race(open_registry, lambda writer, n: writer.promote("a/b", f"{n}.0.0", alias="prod"))
    history = registry.history("a/b", alias="prod")
    assert [state.revision for state in history] == [4, 3, 2, 1]
    assert {state.targets for state in history} == {(Target(f"{n}.0.0"),) for n in range(4)}
    assert registry.verify() == ()


def test_pushing_the_same_version_from_another_place_moves_its_source(registry: Registry) -> None:
    content = make_content()
    for source in ("s3://old/a", None, "s3://new/a", None):
        registry.push("alice/sql@1.0.0", replace(content, source=source))
    assert registry.sources_of(content.cid) == ["s3://new/a"]
