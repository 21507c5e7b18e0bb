from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.store.files import StoreLayout
from loramux.store.gc import Collected
from loramux.store.store import ContentStore
from tests.registry_factory import FakeClock
from tests.store_factory import all_files, damage, write_tiny


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> ContentStore:
    return ContentStore(tmp_path / "store", clock=clock)


def put(store: ContentStore, tmp_path: Path, seed: int) -> str:
    return store.put_folder(write_tiny(tmp_path / str(seed), seed))


def test_what_is_kept_stays_with_all_it_needs(tmp_path: Path, store: ContentStore) -> None:
    kept, lost = put(store, tmp_path, 1), put(store, tmp_path, 2)
    for cid in (kept, lost):
        store.materialize(cid)
    size = store.read(lost).weights_files["adapter_model.safetensors"].size
    # They share the config file, which therefore stays.
    assert store.gc(lambda: {kept}) == Collected(num_adapters=1, num_files=1, freed_bytes=size)
    assert store.cids() == [kept]
    assert store.verify().is_sound
    assert len(list((tmp_path / "store" / "views").iterdir())) == 1


def test_nothing_kept_leaves_nothing(tmp_path: Path, store: ContentStore) -> None:
    store.materialize(put(store, tmp_path, 1))
    store.gc(set)
    assert all_files(tmp_path / "store") == {"lock"}


def test_what_was_put_a_moment_ago_stays(
    tmp_path: Path, store: ContentStore, clock: FakeClock
) -> None:
    cid = put(store, tmp_path, 1)
    clock.advance(59.0)
    assert store.gc(set, min_age_s=60.0).num_adapters == 0
    # Putting it again counts as new, and so does a look at it.
    for use in (lambda: put(store, tmp_path, 1), lambda: store.materialize(cid)):
        use()
        clock.advance(59.0)
        assert store.gc(set, min_age_s=60.0).num_adapters == 0
    clock.advance(1.0)
    assert store.gc(set, min_age_s=60.0).num_adapters == 1
    assert not store.has(cid)


def test_leftovers_of_a_crash_are_removed(tmp_path: Path, store: ContentStore) -> None:
    """A blob whose record was never written, a view and a record that were cut off."""
    cid = put(store, tmp_path, 1)
    store.materialize(cid)
    layout = StoreLayout(tmp_path / "store")
    layout.record(cid).unlink()
    (layout.staging / "work-dead").mkdir()
    (layout.staging / "work-dead" / "half").write_bytes(b"x")
    assert store.gc(set).num_files == 2
    assert all_files(tmp_path / "store") == {"lock"}


def test_no_file_goes_while_a_kept_record_cannot_be_read(
    tmp_path: Path, store: ContentStore
) -> None:
    cid = put(store, tmp_path, 1)
    damage(StoreLayout(tmp_path / "store").record(cid))
    assert store.gc(lambda: {cid}).num_files == 0
    # Putting it again mends it.
    put(store, tmp_path, 1)
    assert store.verify().is_sound


def test_a_damaged_record_that_nobody_needs_goes(tmp_path: Path, store: ContentStore) -> None:
    damage(StoreLayout(tmp_path / "store").record(put(store, tmp_path, 1)))
    assert store.gc(set) == Collected(1, 2, store_size(tmp_path))


def store_size(tmp_path: Path) -> int:
    folder = tmp_path / "1"
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("name", ["unlink", "rmdir"])
def test_a_crash_at_any_removal_leaves_a_sound_store(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Dies at the first removal, then at the second, and so on."""
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
