from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.scheduler.fairness import (
    MAX_REMEMBERED,
    Account,
    Debtors,
    FairShares,
    Ledger,
    Standing,
    Tenure,
)
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams


def make_request(tenant: str, cid: str = "", **weights: float) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=(1,),
        params=SamplingParams(),
        tenant=tenant,
        selection=((cid, 1.0),) if cid else (),
        **weights,  # type: ignore[arg-type]
    )


def tenure(standing: Standing) -> Tenure:
    return Tenure(standing, standing.tenant.counter, standing.adapter.counter)


def test_who_was_away_is_lifted_to_the_least_of_the_others() -> None:
    """Catches credit for absence: a tenant who comes back would shut everybody else out."""
    ledger = Ledger()
    busy, other = ledger.arrive("busy", 1.0), ledger.arrive("other", 1.0)
    busy.counter, other.counter = 900.0, 500.0
    assert ledger.arrive("new", 1.0).counter == 500.0


def test_a_debt_survives_absence() -> None:
    """Catches a tenant who is served twice as much by leaving and coming back."""
    ledger = Ledger()
    ledger.arrive("other", 1.0)
    greedy = ledger.arrive("greedy", 1.0)
    greedy.counter, greedy.num_waiting = 900.0, 0
    assert ledger.settle("greedy")
    assert ledger.arrive("greedy", 1.0).counter == 900.0


def test_nobody_is_lifted_while_something_of_his_waits() -> None:
    ledger = Ledger()
    ledger.arrive("other", 1.0).counter = 500.0
    account = ledger.arrive("slow", 1.0)
    account.counter = 100.0
    ledger.arrive("slow", 1.0)
    assert account.counter == 100.0
    account.num_waiting = 0
    ledger.arrive("slow", 1.0)
    assert account.counter == 500.0


def test_in_an_empty_system_the_last_who_left_sets_the_level() -> None:
    ledger = Ledger()
    account = ledger.arrive("a", 1.0)
    account.counter, account.num_waiting = 900.0, 0
    ledger.settle("a")
    assert ledger.arrive("b", 1.0).counter == 900.0


actions = st.lists(
    st.tuples(st.sampled_from(["arrive", "charge", "leave"]), st.integers(0, 7), st.floats(0, 9)),
    max_size=200,
)


@given(actions)
def test_whoever_arrives_finds_the_least_of_all_others(
    taken: list[tuple[str, int, float]],
) -> None:
    """Beside a ledger that looks at all of them."""
    ledger = Ledger()
    there: dict[int, Account] = {}
    last, debts = 0.0, {}
    for action, key, cost in taken:
        account = there.get(key)
        others = [other.counter for name, other in there.items() if name != key]
        if action == "arrive":
            counter = account.counter if account else debts.pop(key, 0.0)
            if account is None or account.num_waiting == 0:
                counter = max(counter, min(others, default=last))
            there[key] = ledger.arrive(key, 1.0)
            assert there[key].counter == counter
        elif account is not None and action == "charge":
            account.counter += cost
        elif account is not None:
            account.num_waiting -= 1
            if ledger.settle(key):
                last = account.counter
                if last > min(others, default=last):
                    debts[key] = last
                del there[key]


def test_the_closed_do_not_pile_up() -> None:
    """Behind one who has had least, and stays."""
    ledger = Ledger()
    ledger.arrive("stays", 1.0)
    for number in range(1000):
        account = ledger.arrive(number, 1.0)
        account.counter, account.num_waiting = 5.0, 0
        ledger.settle(number)
    assert len(ledger._lowest._heap) < 100


def test_the_absent_are_remembered_in_bounded_number() -> None:
    ledger = Ledger()
    ledger.arrive("stays", 1.0)
    for number in range(MAX_REMEMBERED + 10):
        account = ledger.arrive(number, 1.0)
        account.counter, account.num_waiting = 1.0 + number, 0
        ledger.settle(number)
    assert len(ledger._remembered) == MAX_REMEMBERED
    assert ledger.arrive(0, 1.0).counter == 0.0


def test_weights_divide_the_charge_at_both_levels() -> None:
    standing = FairShares().arrive(make_request("a", "x", tenant_share=2.0, adapter_share=4.0))
    standing.charge(8.0)
    assert (standing.tenant.counter, standing.adapter.counter) == (4.0, 2.0)


def test_adapters_of_different_tenants_have_accounts_of_their_own() -> None:
    shares = FairShares()
    first, second = shares.arrive(make_request("a", "x")), shares.arrive(make_request("b", "x"))
    first.charge(5.0)
    assert second.adapter.counter == 0.0
    assert shares.arrive(make_request("a")).tenant is first.tenant


def test_accounts_close_with_the_last_sequence() -> None:
    shares = FairShares()
    request = make_request("a", "x")
    standings = [shares.arrive(request), shares.arrive(request)]
    standings[0].start()
    shares.check_integrity([request], [request])
    shares.leave(request, standings[0], is_running=True)
    shares.leave(request, standings[1], is_running=False)
    shares.check_integrity([], [])


@pytest.mark.parametrize(
    ("mine", "theirs", "may"),
    [
        ((50.0, 0, 1.0), (100.0, 8, 1.0), True),
        ((100.0, 0, 1.0), (100.0, 8, 1.0), False),
        # With a place of one's own already, only from who keeps at least twice as many.
        ((50.0, 1, 1.0), (100.0, 5, 1.0), True),
        ((50.0, 1, 1.0), (100.0, 4, 1.0), False),
        ((50.0, 1, 2.0), (100.0, 4, 1.0), True),
        # The only place of who has more waiting; but not that of a single request.
        ((50.0, 0, 1.0), (100.0, 1, 1.0), True),
        ((50.0, 0, 1.0), (100.0, -1, 1.0), False),
    ],
)
def test_who_may_take_a_place(
    mine: tuple[float, int, float], theirs: tuple[float, int, float], may: bool
) -> None:
    taker = Account(mine[0], weight=mine[2], num_waiting=1, num_running=mine[1])
    is_single = theirs[1] < 0
    other = Account(theirs[0], theirs[2], 0 if is_single else 9, abs(theirs[1]))
    assert taker.may_take_from(other, other.counter) is may


def test_kept_places_are_those_of_adapters_and_not_of_tenants() -> None:
    """Catches a tenant who keeps places against another."""
    shares = FairShares(num_kept=2)
    standing = shares.arrive(make_request("a", cid="x"))
    assert (standing.tenant.num_kept, standing.adapter.num_kept) == (0, 2)
    hot = Account(100.0, num_waiting=9, num_running=2, num_kept=2)
    cold = Account(0.0, num_waiting=1)
    assert not cold.may_take_from(hot, 100.0)
    hot.num_running = 3
    assert cold.may_take_from(hot, 100.0)


def test_a_tenure_compares_adapters_inside_a_tenant_and_tenants_else() -> None:
    tenant = Account(50.0, num_waiting=9, num_running=4)
    hot = Account(40.0, num_waiting=8, num_running=4)
    running = tenure(Standing(tenant, hot))
    assert running.yields_to(Standing(tenant, Account(10.0, num_waiting=1)))
    assert not running.yields_to(Standing(tenant, hot))
    assert not running.yields_to(Standing(Account(60.0), Account(0.0)))
    assert running.yields_to(Standing(Account(10.0), Account(99.0)))


def test_debtors_answer_as_the_single_tenures_do() -> None:
    tenants = [Account(10.0 * number, 1.0, 2, number) for number in range(4)]
    standings = [
        Standing(tenant, Account(7.0 * number, 1.0, number % 2, 1 + number))
        for tenant in tenants
        for number in range(3)
    ]
    tenures = [tenure(standing) for standing in standings if standing.adapter.counter != 7.0]
    debtors = Debtors(tenures)
    for standing in standings:
        expected = any(one.yields_to(standing) for one in tenures)
        assert debtors.owe(standing) is expected
