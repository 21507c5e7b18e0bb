"""The desired adapters of fleets, changed by several routers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from loramux.registry.registry import Registry
from loramux.types.desired import DesiredAdapter, DesiredConflict, DesiredState
from tests.registry_factory import FakeClock

WANTED = DesiredAdapter(name="n", state=DesiredState.WANTED, source="/a", cid="c")


def test_what_one_router_writes_another_reads(
    open_registry: Callable[[], Registry], clock: FakeClock
) -> None:
    first, second = (open_registry().desired("f") for _ in range(2))
    assert (first.revision(), first.read().adapters) == (0, {})
    written = first.write(WANTED, if_revision=0)
    assert second.read().adapters == {"n": written} and second.revision() == written.revision == 1
    assert written == replace(WANTED, revision=1, changed_at=clock())
    gone = second.write(DesiredAdapter(name="n", state=DesiredState.GONE), if_revision=1)
    assert first.read().adapters == {"n": gone} and gone.revision == 2
    # Another fleet has its own.
    assert not open_registry().desired("g").read().adapters


@pytest.mark.parametrize("revision", [0, 2])
def test_a_change_of_another_router_is_noticed(
    open_registry: Callable[[], Registry], revision: int
) -> None:
    desired = open_registry().desired("f")
    desired.write(WANTED, if_revision=0)
    with pytest.raises(DesiredConflict):
        desired.write(WANTED, if_revision=revision)
    assert desired.revision() == 1


def test_of_changes_at_once_one_wins(open_registry: Callable[[], Registry]) -> None:
    routers = [open_registry().desired("f") for _ in range(4)]

    def change(number: int) -> int:
        try:
            return routers[number % 4].write(WANTED, if_revision=0).revision
        except DesiredConflict:
            return 0

    def add(number: int) -> int:
        adapter = replace(WANTED, name=f"m{number}")
        return routers[number % 4].write(adapter, if_revision=0).revision

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(change, range(8)))[:-1] == [0] * 7
        assert sorted(threads.map(add, range(8))) == list(range(2, 10))
