from __future__ import annotations

import pytest

from loramux.memory.tiers import TRANSITIONS, AdapterState, TierCounters, check_transition


def test_every_state_has_transitions_and_none_skips_the_copy_into_pages() -> None:
    assert TRANSITIONS.keys() == set(AdapterState)
    assert AdapterState.DEVICE not in TRANSITIONS[AdapterState.HOST], "bytes must be copied first"
    assert AdapterState.READING not in TRANSITIONS[AdapterState.HOST], (
        "an image in host memory is not read again"
    )


def test_a_transition_that_is_not_in_the_table_is_an_assertion_error() -> None:
    check_transition("a", AdapterState.HOST, AdapterState.COPYING)
    with pytest.raises(AssertionError, match="cannot go from disk to device"):
        check_transition("a", AdapterState.DISK, AdapterState.DEVICE)


def test_the_bandwidth_is_a_guess_until_a_load_was_measured() -> None:
    counters = TierCounters()
    assert counters.seconds_for(1000, 0.5, 2000.0) == 1.0
    counters.loaded(100, 0.2)
    assert counters.seconds_for(1000, 0.5, 2000.0) == pytest.approx(2.5)
