from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from loramux.errors import InvalidRequest, SourceFailed, StoreFull
from loramux.sources.download import Part, PartialFile, Staging, reporting_full_disk, split_parts
from loramux.sources.origins.base import RemoteFile
from tests.unit.sources.source_factory import entries

FILE = RemoteFile(path="x", size_bytes=10, validator='"1"')


def open_partial(staging: Staging, file: RemoteFile = FILE, source: str = "s") -> PartialFile:
    return staging.open("x", file, source=source)


def fill_half(staging: Staging, file: RemoteFile = FILE) -> None:
    partial = open_partial(staging, file)
    partial.start_over(5, 10)
    partial.write(partial.parts[0], b"01234")
    partial.save()
    partial.close()


@pytest.mark.parametrize(
    ("part_bytes", "size_bytes", "parts"),
    [
        (4, 10, [Part(0, 4), Part(4, 8), Part(8, 10)]),
        (10, 10, [Part(0, 10)]),
        (4, 0, [Part(0, 0)]),
        (4, None, [Part(0, None)]),
        (None, 10, [Part(0, 10)]),
    ],
)
def test_parts_cover_the_file(
    part_bytes: int | None, size_bytes: int | None, parts: list[Part]
) -> None:
    assert split_parts(part_bytes, size_bytes) == parts


def test_parts_are_written_in_any_order_and_found_again(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        partial = open_partial(staging)
        assert partial.parts == []
        partial.start_over(4, 10)
        partial.write(partial.parts[2], b"89")
        partial.write(partial.parts[0], b"012")
        partial.save()
        partial.close()
    with Staging(tmp_path / "target").held():
        again = open_partial(staging)
        assert [part.done_bytes for part in again.parts] == [3, 0, 2]
        again.write(again.parts[0], b"3")
        again.write(again.parts[1], b"4567")
        assert again.head(100) == b"0123456789"
        assert all(part.is_complete for part in again.parts)
        again.close()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (RemoteFile(path="x", size_bytes=10, validator='"2"'), "s"),
        (RemoteFile(path="x", size_bytes=11, validator='"1"'), "s"),
        (RemoteFile(path="x", size_bytes=10, validator=None), "s"),
        (FILE, "another source"),
    ],
)
def test_what_may_be_of_other_bytes_is_not_gone_on_with(
    tmp_path: Path, file: RemoteFile, source: str
) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging)
        partial = open_partial(staging, file, source)
        assert partial.parts == []
        partial.close()


def test_without_a_validator_nothing_is_remembered(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging, RemoteFile(path="x", size_bytes=10, validator=None))
        assert not staging.has_progress
        fill_half(staging)
        assert staging.has_progress


@pytest.mark.parametrize("state", [b"", b"{", b"[]", b"{}", b'{"parts": [[1]]}', b'{"parts": 3}'])
def test_a_damaged_state_is_a_fresh_start(tmp_path: Path, state: bytes) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging)
        next(tmp_path.rglob("x.json")).write_bytes(state)
        partial = open_partial(staging)
        assert partial.parts == []
        partial.close()


def test_a_state_that_speaks_of_more_than_is_there_is_a_fresh_start(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging)
        os.truncate(staging.path_of("x"), 3)
        partial = open_partial(staging)
        assert partial.parts == []
        partial.close()


def test_a_commit_shows_the_named_files_alone_and_removes_the_rest(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "new" / "target")
    with staging.held():
        staging.path_of("a").write_text("a")
        staging.path_of("left over").write_text("b")
        staging.commit(frozenset({"a"}))
    assert entries(tmp_path) == ["new", "new/target", "new/target/a"]


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        staging.path_of("a").write_text("a")
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "b").write_text("b")
        with pytest.raises(InvalidRequest, match="another process fetched it first"):
            staging.commit(frozenset({"a"}))
    assert entries(tmp_path) == ["target", "target/b"]


def test_an_empty_target_is_taken_and_a_link_or_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    staging = Staging(tmp_path / "target")
    with staging.held():
        staging.path_of("a").write_text("a")
        staging.commit(frozenset({"a"}))
    assert entries(tmp_path) == ["target", "target/a"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("x")
    for name in ("link", "file", "target"):
        with pytest.raises(InvalidRequest, match="exists already"), Staging(tmp_path / name).held():
            pass


def test_only_one_holds_it_at_a_time(tmp_path: Path) -> None:
    with (
        Staging(tmp_path / "target").held(),
        pytest.raises(SourceFailed, match="another process"),
        Staging(tmp_path / "target").held(),
    ):
        pass
    with Staging(tmp_path / "target").held():
        pass


def test_nothing_is_written_through_a_link_in_the_place_of_the_staging_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".target.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="link"), Staging(tmp_path / "target").held():
        pass
    assert entries(tmp_path / "elsewhere") == []


def test_clear_forgets_everything(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging)
        staging.clear()
        assert not staging.has_progress
        assert not staging.path_of("x").exists()
        staging.discard()
    assert entries(tmp_path) == []


def test_a_full_disk_says_so_and_other_errors_stay() -> None:
    with pytest.raises(StoreFull, match="full"), reporting_full_disk():
        raise OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="broken"), reporting_full_disk():
        raise OSError(errno.EIO, "broken")


def test_the_state_is_plain_json_without_secrets(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "target")
    with staging.held():
        fill_half(staging)
        state = json.loads(next(tmp_path.rglob("x.json")).read_bytes())
    assert set(state) == {"source", "validator", "size_bytes", "parts"}
