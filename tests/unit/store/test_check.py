from __future__ import annotations

from pathlib import Path

import pytest

from loramux.store import check as store_check
from loramux.store.files import StoreLayout
from loramux.store.store import ContentStore
from tests.store_factory import damage, write_tiny

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "store")


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def test_a_sound_store_is_counted(tmp_path: Path, store: ContentStore) -> None:
    for seed in (1, 2):
        store.put_folder(write_tiny(tmp_path / str(seed), seed))
    report = store.verify()
    assert report.is_sound
    # Both have the same config.
    assert (report.num_adapters, report.num_files) == (2, 3)
    assert report.size_bytes == store.size_bytes()


def test_each_kind_of_damage_is_named(
    tmp_path: Path, store: ContentStore, layout: StoreLayout
) -> None:
    cids = [store.put_folder(write_tiny(tmp_path / str(seed), seed)) for seed in range(3)]
    damage(layout.blob(store.read(cids[0]).files[WEIGHTS]))
    layout.blob(store.read(cids[1]).files[WEIGHTS]).unlink()
    damage(layout.record(cids[2]))
    text = "\n".join(store.verify().damage)
    assert f"{cids[0]} has the wrong content in {WEIGHTS}" in text
    assert f"{cids[1]} lacks {WEIGHTS}" in text
    assert f"The record of {cids[2]} is broken" in text
    assert not store.verify().is_sound


def test_files_removed_by_gc_during_the_check_are_no_damage(
    tmp_path: Path, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_folder(write_tiny(tmp_path / "a"))
    hash_if_there = store_check.hash_if_there

    def collect_then_hash(path: Path) -> object:
        store.gc(set)
        return hash_if_there(path)

    monkeypatch.setattr(store_check, "hash_if_there", collect_then_hash)
    assert store.verify().damage == ()
