from __future__ import annotations

import pytest

from loramux.memory.tiers import MOVES, AdapterState, TierCounters, check_move


def test_every_state_has_its_moves_and_no_way_leads_past_the_device_pages() -> None:
    assert MOVES.keys() == set(AdapterState)
    assert AdapterState.DEVICE not in MOVES[AdapterState.HOST], "bytes must be copied first"
    assert AdapterState.READING not in MOVES[AdapterState.HOST], "what is here is not read again"


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    check_move("a", AdapterState.HOST, AdapterState.COPYING)
    with pytest.raises(AssertionError, match="cannot go from disk to device"):
        check_move("a", AdapterState.DISK, AdapterState.DEVICE)


def test_the_time_of_a_load_is_a_guess_until_one_was_measured() -> None:
    counters = TierCounters()
    assert counters.seconds_for(1000, 0.5, 2000.0) == 1.0
    counters.loaded(100, 0.2)
    assert counters.seconds_for(1000, 0.5, 2000.0) == pytest.approx(2.5)
