"""Every tier under random load, eviction, pins, aborts, failures and lack of space."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loramux.errors import AdapterRefused, DoesNotFit
from loramux.memory.disk_tier import DiskTier
from loramux.memory.policies import CostAwarePolicy, LruPolicy
from tests.memory_factory import PACKING, TinyMemory, cid_of, facts_of, tiny_memory

NUM_PAGES = 10
CIDS = [cid_of(number, rank=1 + number % 4) for number in range(1, 9)]
# A file of the disk tier: its header, and an adapter of rank 4 at most.
FILE_BYTES = 65536 + 256
adapters = st.sampled_from(CIDS)


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory: TinyMemory
        self.wanted: Counter[str] = Counter()
        self.leased: Counter[str] = Counter()
        self.kv_pages: list[int] = []

    @initialize(
        host_ranks=st.integers(4, 12),
        disk_files=st.integers(0, 4),
        max_host=st.none() | st.integers(1, 3),
        is_lru=st.booleans(),
    )
    def build(self, host_ranks: int, disk_files: int, max_host: int | None, is_lru: bool) -> None:
        policy = LruPolicy() if is_lru else CostAwarePolicy()
        disk = DiskTier(
            Path(self.folder.name),
            budget_bytes=disk_files * FILE_BYTES,
            packing=PACKING,
            policy=policy,
        )
        self.memory = tiny_memory(
            num_pages=NUM_PAGES, host_ranks=host_ranks, disk=disk, max_host=max_host, policy=policy
        )

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(cid=adapters)
    def arrive(self, cid: str) -> None:
        self.memory.residency.want([cid])
        self.wanted[cid] += 1

    @rule(cid=adapters)
    def abort(self, cid: str) -> None:
        if self.wanted[cid]:
            self.memory.residency.unwant([cid])
            self.wanted[cid] -= 1

    @rule(cid=adapters)
    def hurry(self, cid: str) -> None:
        if self.wanted[cid]:
            self.memory.residency.hurry([cid])

    @rule(cid=adapters)
    def admit(self, cid: str) -> None:
        """As the scheduler does: fail the request, lease the adapter, or go on waiting."""
        if not self.wanted[cid]:
            return
        try:
            is_ready = self.memory.residency.is_ready([cid])
        except (AdapterRefused, DoesNotFit):
            self.abort(cid)
            return
        if is_ready and self.memory.residency.acquire([cid]):
            self.leased[cid] += 1
            assert self.memory.value(cid) == float(facts_of(cid)[0]), "another adapter's bytes"
            self.abort(cid)

    @rule(cid=adapters)
    def finish(self, cid: str) -> None:
        if self.leased[cid]:
            assert self.memory.value(cid) == float(facts_of(cid)[0]), "bytes changed while in use"
            self.memory.residency.release([cid])
            self.leased[cid] -= 1

    @rule()
    def poll(self) -> None:
        self.memory.residency.poll()

    @rule(count=st.integers(1, 3))
    def load(self, count: int) -> None:
        for _ in range(min(count, len(self.memory.executor.jobs))):
            self.memory.executor.run_one()

    @rule(cid=adapters, is_pinned=st.booleans())
    def pin(self, cid: str, is_pinned: bool) -> None:
        try:
            self.memory.residency.pin(cid, is_pinned=is_pinned)
        except DoesNotFit:
            assert is_pinned

    @rule(cid=adapters)
    def forget(self, cid: str) -> None:
        if self.memory.residency.forget(cid):
            assert not self.wanted[cid] and not self.leased[cid]
            assert cid not in self.memory.residency and cid not in self.memory.host

    @rule(cid=adapters)
    def prewarm(self, cid: str) -> None:
        self.memory.residency.prewarm([cid])

    @rule(cid=adapters)
    def break_source(self, cid: str) -> None:
        self.memory.adapters.broken ^= {cid}

    @rule(cid=adapters)
    def damage_disk(self, cid: str) -> None:
        for path in Path(self.folder.name).glob(f"*/{cid.rpartition(':')[2]}.image"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    @rule(count=st.integers(1, 6))
    def grow_kv(self, count: int) -> None:
        """A sequence takes pages, at the cost of idle adapters."""
        if self.memory.room.make_room(count):
            taken = self.memory.pages.allocate(("kv", 0), count)
            assert taken is not None
            self.kv_pages += taken

    @rule()
    def free_kv(self) -> None:
        self.memory.pages.release(("kv", 0), self.kv_pages)
        self.kv_pages = []

    @invariant()
    def all_is_accounted_for(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory = self.memory
        memory.residency.check_integrity(dict(+self.leased))
        memory.room.check_integrity()
        memory.pages.check_integrity(
            {**memory.residency.claims(), **({("kv", 0): self.kv_pages} if self.kv_pages else {})}
        )
        assert memory.tiers.disk is not None
        memory.tiers.disk.check_integrity()
        wants = {cid: r.num_wants for cid, r in memory.residency.records.items() if r.num_wants}
        assert wants == dict(+self.wanted)


# 100 runs of up to 100 steps each.
TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)
