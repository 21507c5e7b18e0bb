"""The table of adapters over engine processes: what a process must learn, and what was hot."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.types.adapter import AdapterCard
from loramux.worker.adapter_table import AdapterTable

CIDS = st.sampled_from([f"cid-{number}" for number in range(5)])


def make_card(cid: str) -> AdapterCard:
    return AdapterCard(cid=cid, path=f"/{cid}", rank=4, num_bytes=64)


class AdapterTableMachine(RuleBasedStateMachine):
    """A table, and an engine process that knows what it was told and uses what requests name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable()
        self.engine: set[str] = set()
        self.uses: list[str] = []

    @rule(cid=CIDS)
    def add(self, cid: str) -> None:
        self.table.add(make_card(cid))
        self.engine.add(cid)

    @rule(cid=CIDS)
    def use(self, cid: str) -> None:
        if cid not in self.table.cards:
            assert self.table.take_unknown([cid]) == []
            return
        self.table.mark_used(cid)
        self.uses.append(cid)
        told = self.table.take_unknown([cid])
        assert [card.cid for card in told] == [cid] * (cid not in self.engine)
        self.engine.add(cid)

    @rule(cid=CIDS)
    def pin(self, cid: str) -> None:
        if cid in self.table.cards:
            self.table.pinned.add(cid)

    @precondition(lambda self: self.table.cards)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        cid = data.draw(st.sampled_from(sorted(self.table.cards)))
        assert self.table.remove(cid) == (cid in self.engine)
        self.engine.discard(cid)
        self.uses = [used for used in self.uses if used != cid]

    @rule()
    def restart(self) -> None:
        hot = self.table.hottest(self.engine)
        assert set(hot) == self.engine & set(self.uses)
        last = [len(self.uses) - self.uses[::-1].index(cid) for cid in hot]
        assert last == sorted(last, reverse=True), "the most recently used one comes first"
        self.table.begin_process()
        self.engine.clear()

    @invariant()
    def nothing_removed_is_left(self) -> None:
        assert self.engine <= self.table.cards.keys()
        assert self.table.pinned <= self.table.cards.keys()


TestAdapterTable = AdapterTableMachine.TestCase
TestAdapterTable.settings = settings(max_examples=50, stateful_step_count=30)
