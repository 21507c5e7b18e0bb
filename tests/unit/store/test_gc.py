"""Garbage collection of the store, and of a real bucket in SeaweedFS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from loramux.sources.config import S3Config, Secret, SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.files import StoreLayout
from loramux.store.gc import BucketPlan, Collected, cid_of, collect_bucket, is_blob, plan_bucket
from loramux.store.store import ContentStore
from tests.registry_factory import FakeClock
from tests.s3_server import S3Server
from tests.store_factory import all_files, damage, write_tiny


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> ContentStore:
    return ContentStore(tmp_path / "store", clock=clock)


def put(store: ContentStore, tmp_path: Path, seed: int) -> str:
    return store.put_folder(write_tiny(tmp_path / str(seed), seed))


def test_kept_adapters_keep_all_files(tmp_path: Path, store: ContentStore) -> None:
    kept, lost = put(store, tmp_path, 1), put(store, tmp_path, 2)
    for cid in (kept, lost):
        store.materialize(cid)
    size = store.read(lost).covered_files["adapter_model.safetensors"].size
    # Both share the config file, so it stays.
    assert store.gc(lambda: {kept}) == Collected(num_adapters=1, num_files=1, freed_bytes=size)
    assert store.cids() == [kept]
    assert store.verify().is_sound
    assert len(list((tmp_path / "store" / "views").iterdir())) == 1


def test_nothing_kept_leaves_nothing(tmp_path: Path, store: ContentStore) -> None:
    store.materialize(put(store, tmp_path, 1))
    store.gc(set)
    assert all_files(tmp_path / "store") == {"lock"}


def test_recently_put_adapters_stay(tmp_path: Path, store: ContentStore, clock: FakeClock) -> None:
    cid = put(store, tmp_path, 1)
    clock.advance(59.0)
    assert store.gc(set, min_age_s=60.0).num_adapters == 0
    # A second put counts as new, and so does opening it.
    for use in (lambda: put(store, tmp_path, 1), lambda: store.materialize(cid)):
        use()
        clock.advance(59.0)
        assert store.gc(set, min_age_s=60.0).num_adapters == 0
    clock.advance(1.0)
    assert store.gc(set, min_age_s=60.0).num_adapters == 1
    assert not store.has(cid)


def test_leftovers_of_a_crash_are_removed(tmp_path: Path, store: ContentStore) -> None:
    """Leaves a blob without a record, a partial view and a partial record."""
    cid = put(store, tmp_path, 1)
    store.materialize(cid)
    layout = StoreLayout(tmp_path / "store")
    layout.record(cid).unlink()
    (layout.staging / "work-dead").mkdir()
    (layout.staging / "work-dead" / "half").write_bytes(b"x")
    assert store.gc(set).num_files == 2
    assert all_files(tmp_path / "store") == {"lock"}


def test_a_damaged_kept_record_keeps_all_files(tmp_path: Path, store: ContentStore) -> None:
    cid = put(store, tmp_path, 1)
    damage(StoreLayout(tmp_path / "store").record(cid))
    assert store.gc(lambda: {cid}).num_files == 0
    # A second put repairs it.
    put(store, tmp_path, 1)
    assert store.verify().is_sound


def test_a_damaged_unreferenced_record_is_removed(tmp_path: Path, store: ContentStore) -> None:
    damage(StoreLayout(tmp_path / "store").record(put(store, tmp_path, 1)))
    assert store.gc(set) == Collected(1, 2, store_size(tmp_path))


def store_size(tmp_path: Path) -> int:
    folder = tmp_path / "1"
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("name", ["unlink", "rmdir"])
def test_a_crash_at_any_removal_leaves_an_intact_store(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The process dies at the first removal, then at the second, and so on."""
    store = ContentStore(tmp_path / "store", clock=clock)
    kept = put(store, tmp_path, 0)
    for num_allowed in range(8):
        store.materialize(put(store, tmp_path, 1))
        dying(monkeypatch, name, num_allowed)
        try:
            store.gc(lambda: {kept})
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        assert store.verify().is_sound
        again = ContentStore(tmp_path / "store", clock=clock)
        view = again.materialize(put(again, tmp_path, 1))
        assert len(list(view.iterdir())) == 2
    store.gc(lambda: {kept})
    assert store.cids() == [kept]


def dying(monkeypatch: pytest.MonkeyPatch, name: str, num_allowed: int) -> None:
    real, left = getattr(os, name), [num_allowed]

    def remove(*arguments: object, **options: object) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*arguments, **options)

    monkeypatch.setattr(os, name, remove)


FUTURE = time.time() + 3600


class Shared:
    """A bucket, and a store that pushes into it."""

    def __init__(self, tier: ObjectTier, folder: Path) -> None:
        self.tier = tier
        self.folder = folder
        self.store = ContentStore(folder / "store", tiers=[tier])

    def push(self, seed: int) -> str:
        return self.store.put_folder(write_tiny(self.folder / f"source-{seed}", seed))

    def find_keys(self) -> set[str]:
        return {found.key for found in self.tier.objects()}

    def cids(self) -> set[str]:
        return {cid for key in self.find_keys() if (cid := cid_of(key)) is not None}

    def collect(self, kept: set[str], *, older_than: float = FUTURE) -> BucketPlan:
        plan = plan_bucket(self.tier, lambda: kept, older_than=older_than)
        return collect_bucket(self.tier, plan, lambda: kept)

    def is_whole(self, cid: str) -> bool:
        """Fetch an adapter on a machine with an empty store."""
        fresh = ContentStore(self.folder / uuid4().hex, tiers=[self.tier])
        return fresh.materialize(cid).is_dir()


@pytest.fixture
def shared(s3_server: S3Server, tmp_path: Path) -> Shared:
    config = SourceConfig(
        s3=S3Config(
            endpoint=s3_server.endpoint,
            region="us-east-1",
            access_key_id=Secret(s3_server.access_key_id),
            secret_access_key=Secret(s3_server.secret_access_key),
        )
    )
    url = f"s3://{s3_server.bucket}/gc/{uuid4().hex}"
    return Shared(ObjectTier(url, config), tmp_path)


def test_unreferenced_adapters_are_removed_and_shared_files_stay(shared: Shared) -> None:
    kept, doomed = shared.push(1), shared.push(2)
    before = shared.find_keys()
    plan = plan_bucket(shared.tier, lambda: {kept}, older_than=FUTURE)
    assert shared.find_keys() == before, "a plan removes nothing"
    assert [cid_of(one.key) for one in plan.records] == [doomed]
    assert len(plan.blobs) == 1, "both have the same config file"
    assert plan.freed_bytes == sum(one.size_bytes for one in plan.objects) > 0
    gone = collect_bucket(shared.tier, plan, lambda: {kept})
    assert gone.objects == plan.objects
    assert shared.cids() == {kept} and shared.is_whole(kept)
    assert shared.find_keys() == before - {one.key for one in plan.objects}


def test_newer_objects_stay(shared: Shared) -> None:
    kept, young = shared.push(1), shared.push(2)
    plan = shared.collect({kept}, older_than=time.time() - 60)
    assert not plan.objects and plan.num_referred == 1
    assert shared.is_whole(young)


def test_files_of_a_running_push_stay_by_their_age(shared: Shared) -> None:
    shared.push(1)
    [record] = [key for key in shared.find_keys() if cid_of(key)]
    shared.tier.delete([record])
    assert not shared.collect(set(), older_than=time.time() - 60).blobs
    assert len(shared.collect(set()).blobs) == 2 and not shared.find_keys()


@pytest.mark.parametrize("change", ["named", "pushed"])
def test_adapters_named_or_pushed_after_the_plan_stay(change: str, shared: Shared) -> None:
    kept, other = shared.push(1), shared.push(2)
    if change == "pushed":
        shared.tier.delete([key for key in shared.find_keys() if cid_of(key) == other])
    plan = plan_bucket(shared.tier, lambda: {kept}, older_than=FUTURE)
    assert plan.objects
    if change == "pushed":
        assert shared.push(2) == other
    collect_bucket(shared.tier, plan, lambda: {kept, other})
    assert shared.is_whole(other) and shared.is_whole(kept)


def test_a_push_uploads_files_again_that_gc_removed(shared: Shared) -> None:
    shared.push(1)
    has = shared.tier.has
    blobs = [key for key in shared.find_keys() if is_blob(key)]

    def has_until_the_last_look(key: str) -> bool:
        found = has(key)
        if cid_of(key):
            shared.tier.delete(blobs)
            blobs.clear()
        return found

    shared.tier.has = has_until_the_last_look  # type: ignore[method-assign]
    cid = shared.push(1)
    shared.tier.has = has  # type: ignore[method-assign]
    assert shared.is_whole(cid)


def test_a_broken_record_keeps_every_file(shared: Shared, tmp_path: Path) -> None:
    broken, doomed = shared.push(1), shared.push(2)
    (tmp_path / "noise").write_bytes(b"{}")
    shared.tier.put(f"records/{broken.rpartition(':')[2]}", tmp_path / "noise")
    gone = shared.collect({broken})
    assert [cid_of(one.key) for one in gone.records] == [doomed]
    assert not gone.blobs and gone.damaged == [broken]


def test_foreign_objects_are_never_removed(shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_bytes(b"precious")
    for key in ("thesis.txt", "blobs/thesis.txt", "records/thesis", f"other/{'a' * 64}"):
        shared.tier.put(key, tmp_path / "thesis")
    before = shared.find_keys()
    assert not shared.collect(set()).objects and shared.find_keys() == before


@pytest.mark.parametrize(
    ("check", "key", "is_ours"),
    [
        (is_blob, f"blobs/{'a' * 64}", True),
        (is_blob, f"blobs/{'A' * 64}", False),
        (is_blob, "a" * 64, False),
        (cid_of, f"records/{'a' * 64}", True),
        (cid_of, "records/a", False),
    ],
)
def test_keys_are_read_strictly(check: Callable[[str], object], key: str, is_ours: bool) -> None:
    assert bool(check(key)) == is_ours
