"""State machine over all tiers: loads, evictions, pins, aborts, failures and lack of space.

The actions are counted by tier, so that the test fails if one of them never happened.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import DoesNotFit, LoramuxError
from loramux.memory.disk_tier import DiskTier
from loramux.memory.policies import CostAwarePolicy, LruPolicy
from loramux.memory.records import ResidentAdapter
from loramux.types.residency import Tier
from tests.memory_factory import TinyMemory, cid_of, disk_maker, facts_of, tiny_memory
from tests.tier_tally import TIERS, Tally, TierWatch

NUM_PAGES = 10
CIDS = [cid_of(number, rank=1 + number % 4) for number in range(1, 9)]
# A file of the disk tier: its header, and an adapter of rank 4 at most.
FILE_BYTES = 65536 + 256
NUM_STEPS = 10_000 if os.environ.get("LORAMUX_HYPOTHESIS") == "full" else 1_500
MAX_STEPS = 30_000
adapters = st.sampled_from(CIDS)


class CountedDisk(DiskTier):
    tally: Tally

    def put(self, image: AdapterImage) -> bool:
        num_failures = self.counters.failures
        is_kept = super().put(image)
        if not is_kept and self.counters.failures == num_failures:
            self.tally.note("out of space", "disk")
        return is_kept


def blame(error: LoramuxError) -> tuple[str, str]:
    """Return the action and the tier that a failed load counts for."""
    if "host memory has" in str(error):
        return "out of space", "host"
    is_device = "device does not take" in str(error) or "no row is left" in str(error)
    return "fail", "device" if is_device else "host"


class TierMachine(RuleBasedStateMachine):
    tally = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory: TinyMemory
        self.watch: TierWatch
        self.refused: set[str] = set()
        self.wanted: Counter[str] = Counter()
        self.leased: Counter[str] = Counter()
        # Requests of several adapters, by the adapters: waiting, and running.
        self.waiting_sums: list[tuple[str, ...]] = []
        self.running_sums: list[tuple[str, ...]] = []
        self.kv_pages: list[int] = []
        self.table: set[str] = set()
        # What a reader of changes_since() believes of every tier.
        self.version = 0
        self.mirror: dict[str, Tier] = {}

    @initialize(
        host_ranks=st.integers(3, 12),
        disk_files=st.integers(0, 4),
        max_host=st.none() | st.integers(1, 3),
        is_lru=st.booleans(),
        warm=st.lists(adapters, min_size=2, max_size=8),
    )
    def build(
        self,
        host_ranks: int,
        disk_files: int,
        max_host: int | None,
        is_lru: bool,
        warm: list[str],
    ) -> None:
        policy = LruPolicy() if is_lru else CostAwarePolicy()
        self.memory = tiny_memory(
            num_pages=NUM_PAGES,
            host_ranks=host_ranks,
            make_disk=disk_maker(
                Path(self.folder.name),
                budget_bytes=disk_files * FILE_BYTES,
                policy=policy,
                disk_class=CountedDisk,
            ),
            max_host=max_host,
            policy=policy,
            table=self,
        )
        disk = self.memory.tiers.disk
        assert isinstance(disk, CountedDisk)
        disk.tally = self.tally
        self.watch = TierWatch(self.memory, disk, CIDS, self.tally)
        for cid in warm:
            self.serve(cid)

    # The executor's table of adapters.

    def add(self, adapter: ResidentAdapter) -> None:
        if adapter.cid in self.refused:
            raise DoesNotFit(f"no row is left for {adapter.cid}")
        self.table.add(adapter.cid)

    def forget(self, cid: str) -> None:
        self.table.remove(cid)

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(cid=adapters)
    def arrive(self, cid: str) -> None:
        self.memory.residency.add_waiters([cid])
        self.wanted[cid] += 1

    @rule(cid=adapters)
    def abort(self, cid: str) -> None:
        if self.wanted[cid]:
            place = self.watch.place_of(cid)
            if place is not None:
                self.tally.note("abort", place)
            self.leave_queue(cid)

    def leave_queue(self, cid: str) -> None:
        self.memory.residency.remove_waiters([cid])
        self.wanted[cid] -= 1

    @rule(cid=adapters)
    def prioritize(self, cid: str) -> None:
        if self.wanted[cid]:
            self.memory.residency.prioritize([cid])

    @rule(cid=adapters)
    def admit(self, cid: str) -> None:
        """Do what the scheduler does: fail the request, lease the adapter, or keep waiting."""
        if not self.wanted[cid]:
            return
        try:
            is_ready = self.memory.residency.is_ready([cid])
        except LoramuxError as error:
            assert cid in str(error), "another adapter's error"
            self.leave_queue(cid)
            return
        if is_ready and self.memory.residency.acquire([cid]):
            self.leased[cid] += 1
            assert self.memory.value(cid) == float(facts_of(cid)[0]), "another adapter's bytes"
            self.leave_queue(cid)

    @rule(cid=adapters)
    def finish(self, cid: str) -> None:
        if self.leased[cid]:
            assert self.memory.value(cid) == float(facts_of(cid)[0]), "bytes changed while in use"
            self.memory.residency.release([cid])
            self.leased[cid] -= 1

    @rule(cids=st.lists(adapters, min_size=2, max_size=4, unique=True))
    def arrive_sum(self, cids: list[str]) -> None:
        self.memory.residency.add_waiters(cids)
        self.waiting_sums.append(tuple(cids))

    @rule()
    def admit_sum(self) -> None:
        """Leases all adapters of a request or none."""
        if not self.waiting_sums:
            return
        cids = self.waiting_sums[0]
        residency = self.memory.residency
        try:
            is_ready = residency.is_ready(cids)
        except LoramuxError:
            is_ready = None
        if is_ready is False:
            assert not residency.acquire(cids), "leased before all are on the device"
            self.check()
            return
        if is_ready:
            assert residency.acquire(cids)
            self.running_sums.append(cids)
        residency.remove_waiters(cids)
        self.waiting_sums.pop(0)

    @rule()
    def finish_sum(self) -> None:
        if self.running_sums:
            cids = self.running_sums.pop(0)
            for cid in cids:
                assert self.memory.value(cid) == float(facts_of(cid)[0]), "bytes changed in use"
            self.memory.residency.release(cids)

    @rule()
    def abort_sum(self) -> None:
        if self.waiting_sums:
            self.memory.residency.remove_waiters(self.waiting_sums.pop())

    @property
    def all_leases(self) -> dict[str, int]:
        return dict(+(self.leased + Counter(cid for cids in self.running_sums for cid in cids)))

    @property
    def all_waiters(self) -> dict[str, int]:
        return dict(+(self.wanted + Counter(cid for cids in self.waiting_sums for cid in cids)))

    @rule()
    def poll(self) -> None:
        before = self.errors()
        self.memory.residency.poll()
        for cid, error in self.errors().items():
            if cid not in before:
                self.tally.note(*blame(error))
        self.watch.note_stuck()

    def errors(self) -> dict[str, LoramuxError]:
        records = self.memory.residency.records.items()
        return {cid: record.error for cid, record in records if record.error is not None}

    @rule(count=st.integers(1, 3))
    def load(self, count: int) -> None:
        for _ in range(min(count, len(self.memory.executor.jobs))):
            self.memory.executor.run_one()

    @rule()
    def work(self) -> None:
        """Poll, run the loads that were started, and polls again."""
        for act in (self.poll, lambda: self.load(3), self.poll):
            act()
            self.check()

    @rule(cid=adapters)
    def serve(self, cid: str) -> None:
        """Run a request from its arrival to its end, if its load succeeds."""
        for act in (self.arrive, lambda _: self.work(), self.admit, self.finish):
            act(cid)
            self.check()

    @rule(cid=adapters, is_pinned=st.booleans())
    def pin(self, cid: str, is_pinned: bool) -> None:
        place = self.watch.place_of(cid)
        try:
            self.memory.residency.pin(cid, is_pinned=is_pinned)
        except DoesNotFit:
            assert is_pinned
            self.tally.note("out of space", "device")
            return
        if is_pinned and place is not None:
            self.tally.note("pin", place)

    @rule(tier=st.sampled_from(TIERS), number=st.integers(0, len(CIDS)), is_pin=st.booleans())
    def pick(self, tier: str, number: int, is_pin: bool) -> None:
        """Pins an adapter of a tier, or requests it and aborts while it is loading."""
        there = [cid for cid in CIDS if self.watch.place_of(cid) == tier]
        if not there:
            return
        cid = there[number % len(there)]
        if is_pin:
            self.pin(cid, is_pinned=True)
        else:
            self.arrive(cid)
            self.poll()
            self.check()
            self.abort(cid)

    @rule(cid=adapters)
    def unregister(self, cid: str) -> None:
        if self.memory.residency.forget(cid):
            assert cid not in self.all_waiters and cid not in self.all_leases
            assert cid not in self.memory.residency and cid not in self.memory.host

    @rule(cid=adapters)
    def prewarm(self, cid: str) -> None:
        self.memory.residency.prewarm([cid])

    @rule(cid=adapters)
    def break_source(self, cid: str) -> None:
        self.memory.adapters.broken = {cid}

    @rule(cid=adapters)
    def break_device(self, cid: str) -> None:
        self.memory.adapters.unwritable = {cid}

    @rule(cid=adapters)
    def refuse_arrival(self, cid: str) -> None:
        self.refused = {cid}

    @rule(cid=adapters)
    def block_disk(self, cid: str) -> None:
        """Put a folder in the place of its file, which can then not be written or read."""
        if cid not in self.memory.tiers.disk:
            for folder in Path(self.folder.name).iterdir():
                (folder / (cid.rpartition(":")[2] + ".image")).mkdir(exist_ok=True)

    @rule()
    def repair(self) -> None:
        self.memory.adapters.broken = set()
        self.memory.adapters.unwritable = set()
        self.refused = set()
        for path in Path(self.folder.name).glob("*/*.image"):
            if path.is_dir():
                path.rmdir()

    @rule(cid=adapters)
    def damage_disk(self, cid: str) -> None:
        for path in Path(self.folder.name).glob(f"*/{cid.rpartition(':')[2]}.image"):
            if path.is_dir():
                continue
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    @rule(count=st.integers(1, 4))
    def grow_kv(self, count: int) -> None:
        """Allocates pages for a sequence, evicting idle adapters."""
        if self.memory.reclaimer.reclaim(count):
            taken = self.memory.pages.allocate(("kv", 0), count)
            assert taken is not None
            self.kv_pages += taken
        else:
            self.tally.note("out of space", "device")

    @rule()
    def free_kv(self) -> None:
        self.memory.pages.release(("kv", 0), self.kv_pages)
        self.kv_pages = []

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "memory"):
            self.check()
            self.tally.num_steps += 1

    def check(self) -> None:
        memory = self.memory
        memory.residency.check_integrity(self.all_leases)
        memory.reclaimer.check_integrity()
        memory.pages.check_integrity(
            {**memory.residency.claims(), **({("kv", 0): self.kv_pages} if self.kv_pages else {})}
        )
        assert memory.tiers.disk is not None
        memory.tiers.disk.check_integrity()
        wants = {cid: r.num_waiters for cid, r in memory.residency.records.items() if r.num_waiters}
        assert wants == self.all_waiters
        assert self.table == memory.residency.resident.keys()
        self.check_followed_moves()
        self.watch.look()

    def check_followed_moves(self) -> None:
        placement = self.memory.placement
        delta = placement.changes_since(self.version)
        self.mirror = {} if delta.is_full else self.mirror
        self.mirror.update(delta.tiers)
        self.version = delta.version
        true = dict.fromkeys(placement.disk, Tier.DISK)
        true |= dict.fromkeys(placement.host, Tier.HOST)
        true |= dict.fromkeys(placement.device, Tier.DEVICE)
        assert {cid: tier for cid, tier in self.mirror.items() if tier is not Tier.GONE} == true


def test_every_tier_is_consistent_after_thousands_of_actions_of_each_kind() -> None:
    class Counted(TierMachine):
        tally = Tally()

    # A run may end early or miss an action; then there is another one, with other examples.
    run = settings(
        max_examples=15, stateful_step_count=100, deadline=None, database=None, derandomize=False
    )
    tally = Counted.tally
    while tally.num_steps < NUM_STEPS or (tally.never and tally.num_steps < MAX_STEPS):
        num_before = Counted.tally.num_steps
        run_state_machine_as_test(Counted, settings=run)
        assert Counted.tally.num_steps > num_before, "no steps are made any more"
    assert not Counted.tally.never, f"some actions never happened: {Counted.tally.never}"
    print(f"{Counted.tally.num_steps} steps:", dict(sorted(Counted.tally.counts.items())))
