from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.identity import FileDigest
from loramux.errors import InvalidRequest, StoreDamaged
from loramux.store.files import StoreLayout, find_record, size_of
from loramux.store.store import ContentStore
from tests.store_factory import write_tiny

ABSENT = "cidv1:sha256:" + "0" * 64


def test_blobs_are_spread_over_folders(tmp_path: Path) -> None:
    path = StoreLayout(tmp_path).blob(FileDigest("ab" + "c" * 62, 1))
    assert path == tmp_path / "blobs" / "ab" / ("ab" + "c" * 62)


@pytest.mark.parametrize("cid", ["../../etc/passwd", "cidv1:sha256:../x", "x"])
def test_no_text_from_outside_becomes_a_path(tmp_path: Path, cid: str) -> None:
    layout = StoreLayout(tmp_path)
    for make_path in (layout.record, layout.view):
        with pytest.raises(InvalidRequest):
            make_path(cid)


def test_an_absent_record_is_none_and_a_broken_one_is_damage(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    assert layout.read_record(ABSENT) is None
    layout.records.mkdir()
    layout.record(ABSENT).write_bytes(b"?")
    with pytest.raises(StoreDamaged):
        layout.read_record(ABSENT)


def test_a_view_is_whole_only_with_every_file_in_full_length(tmp_path: Path) -> None:
    store, layout = ContentStore(tmp_path / "store"), StoreLayout(tmp_path / "store")
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    record = store.read(cid)
    assert not layout.is_whole(record)
    view = store.materialize(cid)
    assert layout.is_whole(record)
    (view / "adapter_config.json").unlink()
    assert not layout.is_whole(record)
    (view / "adapter_config.json").write_bytes(b"{")
    assert not layout.is_whole(record)


def test_sizes(tmp_path: Path) -> None:
    assert size_of(tmp_path / "none") == 0
    assert size_of(tmp_path / "none", absent=-1) == -1
    store = ContentStore(tmp_path / "store")
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    assert StoreLayout(tmp_path / "store").size_bytes() == store.read(cid).size_bytes


def test_the_record_of_a_view_is_found_from_its_folder(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    given = write_tiny(tmp_path / "a")
    view = store.materialize(store.put_folder(given))
    record = find_record(view)
    assert record is not None and record == store.read(record.cid)
    assert find_record(given) is None
    assert find_record(tmp_path / "absent") is None


@pytest.mark.parametrize("broken", ["view", "record"])
def test_a_damaged_view_or_record_is_not_trusted(tmp_path: Path, broken: str) -> None:
    store, layout = ContentStore(tmp_path / "store"), StoreLayout(tmp_path / "store")
    cid = store.put_folder(write_tiny(tmp_path / "a"))
    view = store.materialize(cid)
    path = view / "adapter_config.json" if broken == "view" else layout.record(cid)
    path.chmod(0o644)
    path.write_bytes(b"{")
    assert find_record(view) is None
