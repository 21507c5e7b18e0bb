from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loramux.adapters.identity import FileDigest
from loramux.errors import AdapterRefused, InvalidRequest, StoreDamaged, StoreFull
from loramux.store import files as store_files
from loramux.store.files import (
    StagingArea,
    StoreLayout,
    StoreLock,
    copy_hashed,
    find_record,
    hash_file,
    is_abandoned,
    link_or_copy,
    make_folder,
    move_into_place,
    reporting_full_disk,
    size_of,
    sync_folder,
    write_file,
)
from loramux.store.store import ContentStore
from tests.store_factory import write_tiny

CONTENT = b"some bytes" * 1000
DIGEST = FileDigest(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


def test_a_copy_is_hashed_as_written_and_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    assert copy_hashed(tmp_path / "a", tmp_path / "b", max_bytes=len(CONTENT)) == DIGEST
    assert (tmp_path / "b").read_bytes() == CONTENT
    assert (tmp_path / "b").stat().st_mode & 0o222 == 0
    assert hash_file(tmp_path / "b") == DIGEST


def test_a_file_that_grows_while_it_is_copied_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with pytest.raises(AdapterRefused, match="larger than 9999 bytes") as caught:
        copy_hashed(tmp_path / "a", tmp_path / "b", max_bytes=9999)
    assert caught.value.code == "too_large"


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_bytes_and_names_reach_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is synced before its content would be an empty file after a power loss."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noting_replace(source: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    write_file(tmp_path / "new", CONTENT)
    move_into_place(tmp_path / "new", tmp_path / "blobs" / "file")
    assert steps == ["sync new", f"sync {tmp_path.name}", "rename", "sync blobs"]


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    sync_folder(tmp_path / "a")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_system_without_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: object, destination: object) -> None:
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(CONTENT)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == CONTENT


def test_other_errors_of_a_link_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "none", tmp_path / "b")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_raises_store_full(number: int) -> None:
    with pytest.raises(StoreFull, match="run gc"), reporting_full_disk():
        raise OSError(number, "full")
    with pytest.raises(PermissionError), reporting_full_disk():
        raise OSError(errno.EACCES, "denied")


def test_chunks_are_small_enough_for_large_files() -> None:
    assert store_files.CHUNK_BYTES <= 2**24


ABSENT = "cidv1:sha256:" + "0" * 64


def test_blobs_are_spread_over_folders(tmp_path: Path) -> None:
    path = StoreLayout(tmp_path).blob(FileDigest("ab" + "c" * 62, 1))
    assert path == tmp_path / "blobs" / "ab" / ("ab" + "c" * 62)


@pytest.mark.parametrize("cid", ["../../etc/passwd", "cidv1:sha256:../x", "x"])
def test_only_a_valid_cid_becomes_a_path(tmp_path: Path, cid: str) -> None:
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


ROOT = Path(__file__).resolve().parents[3]

HOLD_A_FOLDER = """
import sys
from pathlib import Path
from loramux.store.files import StagingArea, StoreLock
root = Path(sys.argv[1])
area = StagingArea(root, prefix="work-", lock=StoreLock(root / "lock"))
with area.folder() as folder:
    (folder / "half").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def make_area(folder: Path) -> StagingArea:
    return StagingArea(folder, prefix="work-", lock=StoreLock(folder / "lock"))


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    inside, most = [], []

    def work() -> None:
        for _ in range(50):
            with lock.held():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 200


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    with lock.held():
        pass


def test_a_folder_is_gone_after_the_block_even_after_an_error(tmp_path: Path) -> None:
    area = make_area(tmp_path)
    with pytest.raises(KeyError), area.folder() as folder:
        (folder / "file").write_bytes(b"x")
        raise KeyError
    assert not folder.exists()


def test_a_folder_in_use_is_never_swept_and_one_of_a_dead_process_is(tmp_path: Path) -> None:
    area = make_area(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_FOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        with area.folder() as ours:
            assert area.sweep() == 0
            assert (theirs / "half").exists() and ours.exists()
        child.send_signal(signal.SIGKILL)
    assert area.sweep() == 1
    assert not theirs.exists()


def test_links_in_the_staging_area_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "work-link").symlink_to(tmp_path / "precious")
    (tmp_path / "work-file").write_bytes(b"x")
    assert make_area(tmp_path).sweep() == 0
    assert (tmp_path / "precious").is_dir()
    assert not is_abandoned(tmp_path / "work-none")


def test_a_folder_removed_during_the_check_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep must not fail on a folder that was removed meanwhile."""
    folder = tmp_path / "work-1"
    folder.mkdir()
    monkeypatch.setattr("loramux.store.files.fcntl.flock", lambda *_: folder.rmdir())
    assert not is_abandoned(folder)
