from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from loramux.adapters.identity import FileDigest
from loramux.errors import AdapterRefused, StoreFull
from loramux.store import files as store_files
from loramux.store.files import (
    copy_hashed,
    hash_file,
    link_or_copy,
    make_folder,
    move_into_place,
    reporting_full_disk,
    sync_folder,
    write_file,
)

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


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_bytes_and_names_reach_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name on the disk before its bytes would be an empty file after a power loss."""
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
def test_a_full_disk_is_told_as_such(number: int) -> None:
    with pytest.raises(StoreFull, match="run gc"), reporting_full_disk():
        raise OSError(number, "full")
    with pytest.raises(PermissionError), reporting_full_disk():
        raise OSError(errno.EACCES, "denied")


def test_chunks_are_small_enough_for_large_files() -> None:
    assert store_files.CHUNK_BYTES <= 2**24
