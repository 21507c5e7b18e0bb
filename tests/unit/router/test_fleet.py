"""The choice of a replica: deterministic, by expected seconds, and stable when replicas go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.router.fleet import FORGET_S, SILENT_S, Fleet, Gap, Replica, State, key_of_name
from loramux.types.residency import Tier
from tests.unit.router.fake_replica import report

NAMES = [f"tenant/a{i}" for i in range(40)]
tiers = st.dictionaries(
    st.sampled_from(NAMES[:8]).map(key_of_name),
    st.sampled_from([Tier.DISK, Tier.HOST, Tier.DEVICE]).map(int),
)
loads = st.fixed_dictionaries({"open": st.integers(0, 60), "slots": st.integers(1, 64)})


def fleet_of(count: int, **fields: Any) -> Fleet:
    fleet = Fleet(Replica(name=f"r{i}", url=f"http://r{i}") for i in range(count))
    for replica in fleet.replicas.values():
        fleet.apply(replica, report(**fields), now=0, own=0)
    return fleet


def order(fleet: Fleet, name: str, now: float = 0.0) -> list[str]:
    return [replica.name for replica in fleet.ranked(name, now=now)]


@given(st.lists(st.tuples(tiers, loads), min_size=1, max_size=20), st.sampled_from(NAMES))
def test_every_usable_replica_comes_once_and_in_the_same_order(
    reports: list[tuple[dict[str, int], dict[str, int]]], name: str
) -> None:
    """With more than sixteen replicas, too, of which only some are compared."""
    fleet = fleet_of(len(reports))
    for replica, (moves, load) in zip(list(fleet.replicas.values()), reports, strict=True):
        fleet.apply(replica, report(moves=moves, **load), now=0, own=0)
    found = order(fleet, name)
    assert sorted(found) == sorted(fleet.replicas)
    assert found == order(fleet, name)


@given(st.sampled_from(NAMES), st.integers(2, 30), st.integers(0, 29))
def test_a_resident_adapter_is_asked_where_it_is_at_equal_load(
    name: str, count: int, index: int
) -> None:
    fleet = fleet_of(count)
    replica = list(fleet.replicas.values())[index % count]
    fleet.apply(replica, report(moves={key_of_name(name): 5}), now=0, own=0)
    assert order(fleet, name)[0] == replica.name


@given(st.sampled_from(NAMES), st.integers(2, 8))
def test_a_full_replica_spills_to_another(name: str, count: int) -> None:
    fleet = fleet_of(count)
    replica = fleet.replicas["r0"]
    moves = {key_of_name(name): 5}
    fleet.apply(replica, report(moves=moves, open=400, slots=8), now=0, own=0)
    assert order(fleet, name)[0] != "r0"


@given(st.integers(2, 12), st.data())
def test_removing_a_replica_moves_only_its_adapters(count: int, data: st.DataObject) -> None:
    fleet = fleet_of(count)
    homes = {name: order(fleet, name)[0] for name in NAMES}
    gone = data.draw(st.sampled_from(sorted(fleet.replicas)))
    fleet.remove(gone)
    for name, home in homes.items():
        assert home == gone or order(fleet, name)[0] == home


def test_homes_are_spread() -> None:
    fleet = fleet_of(4)
    homes = Counter(order(fleet, f"a{i}")[0] for i in range(2000))
    assert all(400 < homes[name] < 600 for name in fleet.replicas)


def test_a_gap_in_the_moves_is_noticed() -> None:
    fleet = fleet_of(1)
    replica = fleet.replicas["r0"]
    fleet.apply(replica, report(full=False, since=0, generation=3), now=0, own=0)
    for wrong in ({"since": 2}, {"since": 3, "instance": "j"}):
        with pytest.raises(Gap):
            fleet.apply(replica, report(full=False, generation=4, **wrong), now=0, own=0)


@given(st.lists(st.tuples(tiers, st.booleans()), max_size=8))
def test_tiers_follow_the_reports(steps: list[tuple[dict[str, int], bool]]) -> None:
    fleet, known = fleet_of(2), dict[str, int]()
    replica = fleet.replicas["r0"]
    for number, (moves, is_full) in enumerate(steps):
        # Every third adapter is gone again.
        moves = {key: tier if number % 3 else 0 for key, tier in moves.items()}
        told = report(moves=moves, full=is_full, since=number, generation=number + 1)
        replica.generation = number
        fleet.apply(replica, told, now=0, own=0)
        known = moves if is_full else known | moves
        known = {key: tier for key, tier in known.items() if tier}
        assert replica.tiers == known
        held = {key for key in map(key_of_name, NAMES) if "r0" in fleet._holders.get(key, {})}
        assert held == known.keys()


def test_draining_and_failed_replicas_are_left_out_while_others_are_there() -> None:
    fleet = fleet_of(3)
    fleet.replicas["r0"].state = State.DRAINING
    fleet.failed(fleet.replicas["r1"], now=0)
    assert order(fleet, "x", now=1) == ["r2"]
    assert set(order(fleet, "x", now=3)) == {"r1", "r2"}
    fleet.replicas["r2"].state = State.UNKNOWN
    assert set(order(fleet, "x", now=1)) == {"r1", "r2"}


def test_a_silent_replica_is_left_out_and_its_tiers_are_forgotten() -> None:
    fleet = fleet_of(2)
    name, key = "x", key_of_name("x")
    fleet.apply(fleet.replicas["r0"], report(moves={key: 5}), now=0, own=0)
    later = SILENT_S + 1
    fleet.apply(fleet.replicas["r1"], report(), now=later, own=0)
    assert order(fleet, name, now=later) == ["r1"]
    assert fleet.replicas["r0"].tier_of(key, FORGET_S + 1) == Tier.SOURCE


def test_an_adapter_on_its_way_is_waited_for_where_it_was_sent() -> None:
    fleet = fleet_of(4)
    second = fleet.replicas[order(fleet, "x")[1]]
    fleet.sent(second, "x", now=0)
    fleet.ended(second)
    assert order(fleet, "x", now=1)[0] == second.name
    assert order(fleet, "x", now=9)[0] != second.name


def test_requests_of_this_router_are_not_counted_twice() -> None:
    fleet = fleet_of(1)
    replica = fleet.replicas["r0"]
    for _ in range(3):
        fleet.sent(replica, "x", now=0)
    # The report was asked for when two of them were open, and others have five.
    fleet.apply(replica, report(open=7), now=0, own=2)
    assert replica.load == 7 - 2 + 3


def test_names_become_the_adapters_that_answered() -> None:
    fleet = fleet_of(3)
    cid = "cidv1:sha256:" + "ab" * 32
    for name in ("acme/pirate", "acme/pirate@1.0.0"):
        fleet.learn(name, cid)
        assert fleet.keys_of(name) == ("ab" * 8,)
    assert order(fleet, "acme/pirate") == order(fleet, "acme/pirate@1.0.0")
    fleet.learn("base", "")
    assert fleet.keys_of("base") == ()
    fleet.move(["acme/pirate"], ("cd" * 8,))
    assert fleet.keys_of("acme/pirate") == ("cd" * 8,)


def test_replicas_of_another_base_are_no_candidates_for_an_adapter_of_this_base() -> None:
    fleet = fleet_of(3)
    fleet.apply(fleet.replicas["r1"], report(base_digest="other"), now=0, own=0)
    fleet.learn("x", "cidv1:sha256:" + "00" * 32, base_digest="other")
    assert order(fleet, "x")[0] == "r1"


def test_the_wait_for_a_place_follows_the_length_of_answers() -> None:
    """Behind short answers a place is free sooner than an adapter is loaded elsewhere."""
    fleet = fleet_of(2)
    home, other = (fleet.replicas[name] for name in order(fleet, "x"))
    for tokens, first in ((8, home), (5000, other)):
        busy = report(moves={key_of_name("x"): 5}, open=9, slots=8, answer_tokens=tokens)
        fleet.apply(home, busy, now=0, own=0)
        assert order(fleet, "x")[0] == first.name


def test_a_name_without_word_of_its_adapter_is_not_taken_for_the_base() -> None:
    fleet = fleet_of(3)
    assert fleet.keys_of("style") == (key_of_name("style"),)
    fleet.learn("base", "")
    assert fleet.keys_of("base") == ()


def test_names_that_are_asked_for_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.router.fleet._MAX_NAMES", 100)
    fleet = fleet_of(2)
    cid = "cidv1:sha256:" + "ab" * 32
    fleet.learn("kept", cid)
    for number in range(1000):
        fleet.learn(f"other-{number}", "cidv1:sha256:" + "cd" * 32)
        assert fleet.keys_of("kept") == ("ab" * 8,)
    assert fleet.keys_of("other-999") == ("cd" * 8,) != fleet.keys_of("other-1")


def test_half_of_a_fleet_is_ejected_at_most_and_each_time_for_longer() -> None:
    fleet = fleet_of(4)
    for replica in fleet.replicas.values():
        for _ in range(20):
            fleet.judge(replica, is_fault=True, now=1)
    out = [r for r in fleet.replicas.values() if r.conduct.is_out(1)]
    assert len(out) == 2 and len(fleet.usable(1)) == 2
    replica, lengths, now = out[0], list[float](), 1.0
    for _ in range(8):
        now = replica.conduct.ejected_until
        assert not replica.conduct.is_out(now)
        # One request at a time.
        fleet.sent(replica, "x", now)
        assert replica.conduct.is_out(now)
        fleet.ended(replica)
        fleet.judge(replica, is_fault=True, now=now)
        lengths.append(replica.conduct.ejected_until - now)
    assert lengths == [4, 8, 16, 32, 60, 60, 60, 60]
    fleet.judge(replica, is_fault=False, now=replica.conduct.ejected_until)
    assert not replica.conduct.is_out(now)


def test_the_last_replica_is_not_ejected() -> None:
    fleet = fleet_of(1)
    for _ in range(20):
        fleet.judge(fleet.replicas["r0"], is_fault=True, now=0)
    assert order(fleet, "x") == ["r0"]


def test_a_new_process_is_not_to_blame_for_the_one_before() -> None:
    fleet = fleet_of(2)
    replica = fleet.replicas["r0"]
    for _ in range(5):
        fleet.judge(replica, is_fault=True, now=0)
    assert replica.conduct.is_out(0)
    fleet.apply(replica, report(instance="j"), now=0, own=0)
    assert not replica.conduct.is_out(0)


def test_a_replica_that_lacks_an_adapter_is_asked_for_others() -> None:
    fleet = fleet_of(2)
    fleet.replicas["r0"].lacking = frozenset({"n"})
    for name in ("n", "n\0Bearer k", "m+n"):
        assert order(fleet, name)[0] == "r1"
    assert {order(fleet, f"x{i}")[0] for i in range(20)} == {"r0", "r1"}
