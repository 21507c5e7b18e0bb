"""Against a real bucket of SeaweedFS; its objects are as old as the test is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from loramux.sources.config import S3Config, Secret, SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.gc import BucketPlan, cid_of, collect_bucket, is_blob, plan_bucket
from loramux.store.store import ContentStore
from tests.s3_server import S3Server
from tests.s3_server import s3_server as s3_server
from tests.store_factory import write_tiny

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
        """On a machine that has nothing else."""
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


def test_what_nobody_names_goes_and_files_that_others_share_stay(shared: Shared) -> None:
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


def test_what_was_written_since_stays(shared: Shared) -> None:
    kept, young = shared.push(1), shared.push(2)
    plan = shared.collect({kept}, older_than=time.time() - 60)
    assert not plan.objects and plan.num_referred == 1
    assert shared.is_whole(young)


def test_files_of_a_push_whose_record_is_not_there_yet_stay_by_their_age(shared: Shared) -> None:
    shared.push(1)
    [record] = [key for key in shared.find_keys() if cid_of(key)]
    shared.tier.delete([record])
    assert not shared.collect(set(), older_than=time.time() - 60).blobs
    assert len(shared.collect(set()).blobs) == 2 and not shared.find_keys()


@pytest.mark.parametrize("change", ["named", "pushed"])
def test_what_is_named_or_pushed_after_the_plan_stays(change: str, shared: Shared) -> None:
    kept, other = shared.push(1), shared.push(2)
    if change == "pushed":
        shared.tier.delete([key for key in shared.find_keys() if cid_of(key) == other])
    plan = plan_bucket(shared.tier, lambda: {kept}, older_than=FUTURE)
    assert plan.objects
    if change == "pushed":
        assert shared.push(2) == other
    collect_bucket(shared.tier, plan, lambda: {kept, other})
    assert shared.is_whole(other) and shared.is_whole(kept)


def test_a_push_that_relied_on_files_which_a_gc_took_puts_them_again(shared: Shared) -> None:
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


def test_what_is_not_the_stores_is_never_touched(shared: Shared, tmp_path: Path) -> None:
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
