from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from loramux.adapters.peft.reader import read_adapter
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    InvalidRequest,
    StoreDamaged,
    StoreFull,
)
from loramux.store.files import StoreLayout
from loramux.store.intake import StagedAdapter, StoreLimits
from loramux.store.store import ContentStore
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.small_disk import read_only
from tests.store_factory import CONFIG, all_files, damage, tiny_weights, write_tiny

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "store")


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def test_the_reader_finds_in_the_store_what_was_put(tmp_path: Path, store: ContentStore) -> None:
    config = tiny_llama_config()
    folder = write_adapter(tmp_path / "a", lora_config_dict(), lora_tensors(config))
    expected = read_adapter(folder, tiny_base_info(config))
    cid = store.put_folder(folder)
    shutil.rmtree(folder)
    found = read_adapter(store.materialize(cid), tiny_base_info(config))
    assert found.cid == cid == expected.cid
    assert found.warnings == expected.warnings == ()
    assert store.read(cid).manifest == found.manifest


def test_the_same_bytes_are_kept_once(tmp_path: Path, store: ContentStore) -> None:
    first = store.put_folder(write_tiny(tmp_path / "a"))
    size = store.size_bytes()
    # The name of the base is not part of the CID.
    renamed = {**CONFIG, "base_model_name_or_path": "renamed"}
    assert store.put_folder(write_tiny(tmp_path / "b", config=renamed)) == first
    assert store.size_bytes() == size
    assert store.put_folder(write_tiny(tmp_path / "c", config={**CONFIG, "r": 8})) != first
    # A different config with the same weights.
    assert store.size_bytes() < 2 * size
    view = store.materialize(first)
    assert json.loads((view / "adapter_config.json").read_text()) == CONFIG


def test_a_view_costs_no_space_and_is_made_once(tmp_path: Path, store: ContentStore) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    view = store.materialize(cid)
    before = {path.name: path.stat() for path in view.iterdir()}
    assert {stat.st_nlink for stat in before.values()} == {2}
    assert store.materialize(cid) == view
    assert {path.name: path.stat().st_ino for path in view.iterdir()} == {
        name: stat.st_ino for name, stat in before.items()
    }


def test_a_partial_view_is_rebuilt(tmp_path: Path, store: ContentStore) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a", seed=1))
    (store.materialize(cid) / WEIGHTS).unlink()
    assert (store.materialize(cid) / WEIGHTS).read_bytes() == tiny_weights(1)


def test_an_absent_adapter_is_not_found(store: ContentStore, tmp_path: Path) -> None:
    cid = "cidv1:sha256:" + "0" * 64
    for ask in (store.materialize, store.read, lambda c: store.copy_out(c, tmp_path / "x")):
        with pytest.raises(AdapterNotFound, match="No adapter with content id"):
            ask(cid)
    assert not store.has(cid) and not store.is_available(cid)
    assert not (tmp_path / "x").exists()


def test_damaged_files_are_never_returned(
    tmp_path: Path, store: ContentStore, layout: StoreLayout
) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    damage(layout.blob(store.read(cid).files[WEIGHTS]))
    with pytest.raises(StoreDamaged, match="Push the adapter again"):
        store.materialize(cid)
    with pytest.raises(StoreDamaged):
        store.copy_out(cid, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_reported(
    tmp_path: Path, store: ContentStore, layout: StoreLayout
) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    damage(layout.record(cid))
    with pytest.raises(StoreDamaged, match="record"):
        store.read(cid)


@pytest.mark.parametrize("with_view", [True, False])
def test_a_second_put_repairs_damage(
    tmp_path: Path, store: ContentStore, layout: StoreLayout, with_view: bool
) -> None:
    folder = write_tiny(tmp_path / "a", seed=1)
    cid = store.put_folder(folder)
    if with_view:
        store.materialize(cid)
    for digest in store.read(cid).files.values():
        damage(layout.blob(digest))
    assert store.put_folder(folder) == cid
    assert store.verify().is_sound
    assert (store.materialize(cid) / WEIGHTS).read_bytes() == tiny_weights(1)


def test_a_refused_folder_leaves_no_files(tmp_path: Path, store: ContentStore) -> None:
    folder = write_tiny(tmp_path / "a")
    (folder / WEIGHTS).write_bytes(b"PK\x03\x04" + b"\0" * 50)
    with pytest.raises(AdapterRefused):
        store.put_folder(folder)
    assert all_files(tmp_path / "store") == {"lock"}


def test_the_store_has_a_limit_and_what_is_there_already_needs_no_room(tmp_path: Path) -> None:
    folders = [write_tiny(tmp_path / str(seed), seed) for seed in range(3)]
    config, weights = (folders[0] / name for name in ("adapter_config.json", WEIGHTS))
    room = config.stat().st_size + 2 * weights.stat().st_size
    store = ContentStore(tmp_path / "store", limits=StoreLimits(max_store_bytes=room))
    kept = {store.put_folder(folders[0]), store.put_folder(folders[1])}
    with pytest.raises(StoreFull, match="run gc"):
        store.put_folder(folders[2])
    assert set(store.cids()) == kept
    assert store.put_folder(folders[0]) in kept
    store.gc(set)
    store.put_folder(folders[2])


def test_gc_cannot_run_before_the_adapter_is_named(tmp_path: Path, store: ContentStore) -> None:
    """A gc in another thread blocks until the name is written, and then sees it."""
    names: set[str] = set()
    collector = threading.Thread(target=lambda: store.gc(lambda: set(names)))

    def name(staged: object) -> None:
        collector.start()
        names.add(staged.record.cid)  # type: ignore[attr-defined]

    cid = store.put_folder(write_tiny(tmp_path / "a"), then=name)
    collector.join()
    assert store.has(cid)


def test_a_refused_name_leaves_an_orphan_that_gc_removes(
    tmp_path: Path, store: ContentStore
) -> None:
    def refuse(staged: object) -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        store.put_folder(write_tiny(tmp_path / "a"), then=refuse)
    assert store.verify().is_sound
    store.gc(set)
    assert all_files(tmp_path / "store") == {"lock"}


def test_copies_are_ordinary_writable_folders(tmp_path: Path, store: ContentStore) -> None:
    folder = write_tiny(tmp_path / "a", seed=1)
    cid = store.put_folder(folder)
    out = store.copy_out(cid, tmp_path / "deep" / "out")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    assert all(path.stat().st_nlink == 1 for path in out.iterdir())
    assert all(path.stat().st_mode & 0o200 for path in out.iterdir())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_copy_never_overwrites_files(tmp_path: Path, store: ContentStore) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    (tmp_path / "empty").mkdir()
    assert store.copy_out(cid, tmp_path / "empty") == tmp_path / "empty"
    for target in (tmp_path / "empty", tmp_path / "a" / WEIGHTS):
        with pytest.raises(InvalidRequest, match="not an empty folder"):
            store.copy_out(cid, target)


def test_leftovers_of_an_interrupted_copy_are_swept_by_the_next(
    tmp_path: Path, store: ContentStore
) -> None:
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    (tmp_path / "out" / ".loramux-pull-dead").mkdir(parents=True)
    store.copy_out(cid, tmp_path / "out" / "copy")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["copy"]


def test_threads_that_put_and_open_the_same_adapter_agree(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", seed=1)
    views: list[bytes] = []

    def work() -> None:
        store = ContentStore(tmp_path / "store")
        for _ in range(5):
            view = store.materialize(store.put_folder(folder))
            views.append((view / WEIGHTS).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert views == [tiny_weights(1)] * 20
    assert ContentStore(tmp_path / "store").verify().is_sound


def test_a_put_keeps_the_view_that_another_one_made_while_it_waited(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", seed=1)
    store, other = (ContentStore(tmp_path / "store") for _ in range(2))
    views: list[Path] = []
    held = store._lock.held

    def held_later() -> AbstractContextManager[None]:
        if is_checked and not views:
            views.append(other.materialize(other.put_folder(folder)))
        return held()

    is_checked: list[StagedAdapter] = []
    store._lock.held = held_later  # type: ignore[method-assign]
    store.put_folder(folder, check=is_checked.append)
    (view,) = views
    assert (view / WEIGHTS).read_bytes() == tiny_weights(1)


def test_without_links_the_view_is_a_copy(
    tmp_path: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, destination: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    cid = store.put_folder(write_tiny(tmp_path / "a", seed=1))
    assert (store.materialize(cid) / WEIGHTS).read_bytes() == tiny_weights(1)


def test_a_store_that_became_read_only_serves_what_it_has(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    cid = store.put_folder(write_tiny(tmp_path / "adapter"))
    view = store.materialize(cid)
    with read_only(tmp_path / "store") as is_read_only:
        if not is_read_only:
            pytest.skip("root without the right to mount cannot make a folder read-only")
        assert store.materialize(cid) == view
        with pytest.raises(OSError, match="Read-only|denied"):
            store.put_folder(write_tiny(tmp_path / "other", 1))
    assert store.cids() == [cid]
