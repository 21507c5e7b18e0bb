"""Compares any sequence of puts, views, copies, collections, crashes and damage with a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loramux.errors import AdapterNotFound, StoreDamaged
from loramux.store.files import StoreLayout
from loramux.store.store import ContentStore
from tests.store_factory import all_files, damage, tiny_weights, write_tiny

WEIGHTS = "adapter_model.safetensors"
SEEDS = st.integers(0, 3)
NUM_EXAMPLES = 20 * int(os.environ.get("LORAMUX_EXAMPLES", "1"))


class StoreMachine(RuleBasedStateMachine):
    """Two stores that share one folder, like two processes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-"))
        self.stores = [ContentStore(self.root / "store") for _ in range(2)]
        self.layout = StoreLayout(self.root / "store")
        self.cids = [
            ContentStore(self.root / "other").put_folder(self.source(seed)) for seed in range(4)
        ]
        self.here: set[int] = set()
        self.damaged: set[int] = set()
        self.num_copies = 0

    def source(self, seed: int) -> Path:
        return write_tiny(self.root / "sources" / str(seed), seed)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(seed=SEEDS, process=st.integers(0, 1))
    def put(self, seed: int, process: int) -> None:
        assert self.stores[process].put_folder(self.source(seed)) == self.cids[seed]
        self.here.add(seed)
        self.damaged.discard(seed)

    @rule(seed=SEEDS, process=st.integers(0, 1))
    def materialize(self, seed: int, process: int) -> None:
        cid = self.cids[seed]
        if seed not in self.here:
            with pytest.raises(AdapterNotFound):
                self.stores[process].materialize(cid)
            return
        if seed in self.damaged:
            return
        view = self.stores[process].materialize(cid)
        assert (view / WEIGHTS).read_bytes() == tiny_weights(seed)

    @rule(seed=SEEDS, process=st.integers(0, 1))
    def copy_out(self, seed: int, process: int) -> None:
        self.num_copies += 1
        folder = self.root / "out" / str(self.num_copies)
        if seed in self.here and seed not in self.damaged:
            self.stores[process].copy_out(self.cids[seed], folder)
            assert (folder / WEIGHTS).read_bytes() == tiny_weights(seed)
            return
        with pytest.raises((AdapterNotFound, StoreDamaged)):
            self.stores[process].copy_out(self.cids[seed], folder)
        assert not folder.exists()

    @rule(kept=st.sets(SEEDS), process=st.integers(0, 1))
    def collect(self, kept: set[int], process: int) -> None:
        found = self.stores[process].gc(lambda: {self.cids[seed] for seed in kept})
        assert found.num_adapters == len(self.here - kept)
        self.here &= kept
        self.damaged &= kept

    @rule(seed=SEEDS)
    def damage_weights(self, seed: int) -> None:
        if seed in self.here - self.damaged:
            record = self.layout.read_record(self.cids[seed])
            assert record is not None
            damage(self.layout.blob(record.files[WEIGHTS]))
            self.damaged.add(seed)

    @rule(seed=SEEDS)
    def break_view(self, seed: int) -> None:
        """Remove a view partially, like a crash during a removal."""
        (self.layout.view(self.cids[seed]) / WEIGHTS).unlink(missing_ok=True)

    @rule(seed=SEEDS)
    def die_before_the_record(self, seed: int) -> None:
        """Leaves files of a process that died."""
        if seed in self.here:
            return
        self.stores[0].put_folder(self.source(seed))
        self.layout.record(self.cids[seed]).unlink()

    @rule()
    def die_while_staging(self) -> None:
        folder = self.layout.staging / "work-dead"
        folder.mkdir(exist_ok=True)
        (folder / "half").write_bytes(b"x")

    @invariant()
    def the_store_knows_what_it_has_and_what_is_wrong(self) -> None:
        assert set(self.stores[0].cids()) == {self.cids[seed] for seed in self.here}
        report = self.stores[1].verify()
        named = {seed for seed in self.here if any(self.cids[seed] in d for d in report.damage)}
        assert named == self.damaged
        assert report.is_sound or self.damaged

    @invariant()
    def after_a_collection_only_what_is_needed_is_there(self) -> None:
        if self.damaged:
            return
        self.stores[0].gc(lambda: set(self.cids))
        num_blobs = len(all_files(self.layout.blobs))
        assert num_blobs == (len(self.here) + 1 if self.here else 0)
        assert not list(self.layout.staging.iterdir())


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=20, deadline=None)
