from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.scheduler.fairness import (
    MAX_REMEMBERED,
    Client,
    Clients,
    ClientTable,
    FairShares,
    PreemptionIndex,
    PreemptionLimit,
)
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams


def make_request(tenant: str, cid: str = "", **shares: float) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=(1,),
        params=SamplingParams(),
        tenant=tenant,
        selection=((cid, 1.0),) if cid else (),
        **shares,  # type: ignore[arg-type]
    )


def test_requests_of_the_same_adapters_are_one_client_whatever_their_weights() -> None:
    """Catches a tenant whose request with a thousand weights crowd out its other adapters."""
    shares = FairShares()
    one, other = (
        msgspec.structs.replace(make_request("t"), selection=(("x", weight), ("y", 1.0)))
        for weight in (0.3, 0.4)
    )
    first, second = shares.arrive(one), shares.arrive(other)
    assert first.adapter is second.adapter
    assert shares.arrive(make_request("t", "x")).adapter is not first.adapter
    shares.leave(one, first, is_running=False)
    shares.check_integrity([other, make_request("t", "x")], [])


def preemption_limit(clients: Clients) -> PreemptionLimit:
    return PreemptionLimit(clients, clients.tenant.counter, clients.adapter.counter)


def test_r3_a_new_client_is_lifted_to_the_lowest_counter_of_the_others() -> None:
    """Catches credit for absence, with which a returning tenant would starve all others."""
    table = ClientTable()
    busy, other = table.add_waiting("busy", 1.0), table.add_waiting("other", 1.0)
    busy.counter, other.counter = 900.0, 500.0
    assert table.add_waiting("new", 1.0).counter == 500.0


def test_r3_a_high_counter_is_remembered_during_absence() -> None:
    """Catches a tenant that is served twice as much by leaving and returning."""
    table = ClientTable()
    table.add_waiting("other", 1.0)
    greedy = table.add_waiting("greedy", 1.0)
    greedy.counter, greedy.num_waiting = 900.0, 0
    assert table.remove_if_idle("greedy")
    assert table.add_waiting("greedy", 1.0).counter == 900.0


def test_r3_a_client_with_waiting_sequences_is_not_lifted() -> None:
    table = ClientTable()
    table.add_waiting("other", 1.0).counter = 500.0
    client = table.add_waiting("slow", 1.0)
    client.counter = 100.0
    table.add_waiting("slow", 1.0)
    assert client.counter == 100.0
    client.num_waiting = 0
    table.add_waiting("slow", 1.0)
    assert client.counter == 500.0


def test_r3_in_an_empty_system_the_last_client_sets_the_counter() -> None:
    table = ClientTable()
    client = table.add_waiting("a", 1.0)
    client.counter, client.num_waiting = 900.0, 0
    table.remove_if_idle("a")
    assert table.add_waiting("b", 1.0).counter == 900.0


actions = st.lists(
    st.tuples(st.sampled_from(["arrive", "charge", "leave"]), st.integers(0, 7), st.floats(0, 9)),
    max_size=200,
)


@given(actions)
def test_r3_the_lowest_counter_is_that_of_a_full_search(
    taken: list[tuple[str, int, float]],
) -> None:
    """Compares with a search of all clients."""
    table = ClientTable()
    there: dict[int, Client] = {}
    last, remembered = 0.0, {}
    for action, key, cost in taken:
        client = there.get(key)
        others = [other.counter for name, other in there.items() if name != key]
        if action == "arrive":
            counter = client.counter if client else remembered.pop(key, 0.0)
            if client is None or client.num_waiting == 0:
                counter = max(counter, min(others, default=last))
            there[key] = table.add_waiting(key, 1.0)
            assert there[key].counter == counter
        elif client is not None and action == "charge":
            client.counter += cost
        elif client is not None:
            client.num_waiting -= 1
            if table.remove_if_idle(key):
                last = client.counter
                if last > min(others, default=last):
                    remembered[key] = last
                del there[key]


def test_r3_inactive_clients_are_removed_from_the_heap() -> None:
    """One client with the lowest counter stays active, so that the others stay in the heap."""
    table = ClientTable()
    table.add_waiting("stays", 1.0)
    for number in range(1000):
        client = table.add_waiting(number, 1.0)
        client.counter, client.num_waiting = 5.0, 0
        table.remove_if_idle(number)
    assert len(table._min_counter._heap) < 100


def test_r3_a_bounded_number_of_counters_is_remembered() -> None:
    table = ClientTable()
    table.add_waiting("stays", 1.0)
    for number in range(MAX_REMEMBERED + 10):
        client = table.add_waiting(number, 1.0)
        client.counter, client.num_waiting = 1.0 + number, 0
        table.remove_if_idle(number)
    assert len(table._remembered) == MAX_REMEMBERED
    assert table.add_waiting(0, 1.0).counter == 0.0


def test_r2_shares_divide_the_charge_at_both_levels() -> None:
    clients = FairShares().arrive(make_request("a", "x", tenant_share=2.0, adapter_share=4.0))
    clients.charge(8.0)
    assert (clients.tenant.counter, clients.adapter.counter) == (4.0, 2.0)


def test_r2_adapters_of_different_tenants_have_their_own_counters() -> None:
    shares = FairShares()
    first, second = shares.arrive(make_request("a", "x")), shares.arrive(make_request("b", "x"))
    first.charge(5.0)
    assert second.adapter.counter == 0.0
    assert shares.arrive(make_request("a")).tenant is first.tenant


def test_r3_a_client_becomes_inactive_with_its_last_sequence() -> None:
    shares = FairShares()
    request = make_request("a", "x")
    all_clients = [shares.arrive(request), shares.arrive(request)]
    all_clients[0].start()
    shares.check_integrity([request], [request])
    shares.leave(request, all_clients[0], is_running=True)
    shares.leave(request, all_clients[1], is_running=False)
    shares.check_integrity([], [])


@pytest.mark.parametrize(
    ("mine", "theirs", "may"),
    [
        ((50.0, 0, 1.0), (100.0, 8, 1.0), True),
        ((100.0, 0, 1.0), (100.0, 8, 1.0), False),
        # With a slot of its own, only from a client that keeps at least twice as many.
        ((50.0, 1, 1.0), (100.0, 5, 1.0), True),
        ((50.0, 1, 1.0), (100.0, 4, 1.0), False),
        ((50.0, 1, 2.0), (100.0, 4, 1.0), True),
        # The only slot of a client with more waiting, but not that of a single request.
        ((50.0, 0, 1.0), (100.0, 1, 1.0), True),
        ((50.0, 0, 1.0), (100.0, -1, 1.0), False),
    ],
)
def test_r10_which_client_may_preempt_another(
    mine: tuple[float, int, float], theirs: tuple[float, int, float], may: bool
) -> None:
    taker = Client(mine[0], share=mine[2], num_waiting=1, num_running=mine[1])
    is_single = theirs[1] < 0
    other = Client(theirs[0], theirs[2], 0 if is_single else 9, abs(theirs[1]))
    assert taker.may_preempt(other, other.counter) is may


def test_r10_adapters_have_protected_slots_and_tenants_have_none() -> None:
    """Catches protected slots of a tenant against another one."""
    shares = FairShares(num_protected_slots=2)
    clients = shares.arrive(make_request("a", cid="x"))
    assert (clients.tenant.num_protected_slots, clients.adapter.num_protected_slots) == (0, 2)
    hot = Client(100.0, num_waiting=9, num_running=2, num_protected_slots=2)
    cold = Client(0.0, num_waiting=1)
    assert not cold.may_preempt(hot, 100.0)
    hot.num_running = 3
    assert cold.may_preempt(hot, 100.0)


def test_r10_adapters_are_compared_inside_a_tenant_and_tenants_otherwise() -> None:
    tenant = Client(50.0, num_waiting=9, num_running=4)
    hot = Client(40.0, num_waiting=8, num_running=4)
    running = preemption_limit(Clients(tenant, hot))
    assert running.allows(Clients(tenant, Client(10.0, num_waiting=1)))
    assert not running.allows(Clients(tenant, hot))
    assert not running.allows(Clients(Client(60.0), Client(0.0)))
    assert running.allows(Clients(Client(10.0), Client(99.0)))


def test_r10_the_index_agrees_with_the_single_limits() -> None:
    tenants = [Client(10.0 * number, 1.0, 2, number) for number in range(4)]
    all_clients = [
        Clients(tenant, Client(7.0 * number, 1.0, number % 2, 1 + number))
        for tenant in tenants
        for number in range(3)
    ]
    limits = [
        preemption_limit(clients) for clients in all_clients if clients.adapter.counter != 7.0
    ]
    index = PreemptionIndex(limits)
    for clients in all_clients:
        expected = any(one.allows(clients) for one in limits)
        assert index.has_victim_for(clients) is expected
