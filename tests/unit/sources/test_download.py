from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.errors import InvalidRequest, SourceFailed, SourceRefused, StoreFull
from loramux.sources.config import FetchLimits
from loramux.sources.download import (
    Download,
    Meter,
    Part,
    PartialFile,
    Progress,
    Staging,
    reporting_full_disk,
    split_parts,
)
from loramux.sources.origins.base import RemoteFile
from loramux.sources.retry import Deadline
from tests.unit.sources.source_factory import WEIGHTS, WEIGHTS_NAME, FakeTime, entries

LIMITS = FetchLimits(max_attempts=3, part_bytes=4096)
FILE = RemoteFile(path="x", size_bytes=len(WEIGHTS), validator='"1"')


class ScriptedOrigin:
    """An origin that fails after a number of bytes per read, then returns the rest."""

    revision = None

    def __init__(self, content: bytes = WEIGHTS, cuts: list[int] | None = None) -> None:
        self.content = content
        self.cuts = list(cuts or [])
        self.reads: list[tuple[int, int | None]] = []
        self._lock = threading.Lock()

    def file_names(self) -> Sequence[str]:
        return ()

    def find(self, name: str) -> RemoteFile | None:
        raise AssertionError("the file is known")

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        with self._lock:
            self.reads.append((start, end))
            cut = self.cuts.pop(0) if self.cuts else None
        yield self.chunks(self.content[start:end], cut)

    def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
        for position in range(0, len(content[:cut]), 1000):
            yield content[:cut][position : position + 1000]
        if cut is not None:
            raise SourceFailed("cut")

    def close(self) -> None:
        pass


def download(
    origin: ScriptedOrigin,
    folder: Path,
    *,
    file: RemoteFile = FILE,
    limits: FetchLimits = LIMITS,
    time: FakeTime | None = None,
    max_bytes: int = 10**6,
) -> list[Progress]:
    received: list[Progress] = []
    staging = Staging(folder / "target")
    with staging.held():
        partial = staging.open(WEIGHTS_NAME, file, source="s")
        try:
            Download(
                origin,
                file,
                partial,
                limits=limits,
                deadline=Deadline(limits.timeout_s, (time or FakeTime()).timing),
                meter=Meter(file.size_bytes, received.append),
            ).run(max_bytes=max_bytes)
        finally:
            partial.close()
    return received


def result(folder: Path) -> bytes:
    return (folder / ".target.partial" / "files" / WEIGHTS_NAME).read_bytes()


# Few examples, because every part is synced to disk.
@settings(max_examples=20)
@given(
    cuts=st.lists(st.integers(0, 5000), max_size=12),
    part_bytes=st.integers(500, 12_000),
    num_workers=st.integers(1, 4),
)
def test_whatever_breaks_off_the_bytes_are_right(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], part_bytes: int, num_workers: int
) -> None:
    folder = tmp_path_factory.mktemp("download")
    limits = FetchLimits(max_attempts=20, part_bytes=part_bytes, num_workers=num_workers)
    received = download(ScriptedOrigin(cuts=cuts), folder, limits=limits)
    assert result(folder) == WEIGHTS
    assert received[-1].received_bytes == len(WEIGHTS)


def test_a_part_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    origin = ScriptedOrigin(cuts=[1500, 500])
    download(origin, tmp_path, limits=replace(LIMITS, part_bytes=10**6))
    assert origin.reads == [(0, 10079), (1500, 10079), (2000, 10079)]


def test_a_file_that_cannot_be_sought_starts_over(tmp_path: Path) -> None:
    file = RemoteFile(path="x", size_bytes=len(WEIGHTS), validator=None, can_seek=False)
    origin = ScriptedOrigin(cuts=[1500])
    received = download(origin, tmp_path, file=file)
    assert origin.reads == [(0, 10079), (0, 10079)]
    assert received[-1].received_bytes == len(WEIGHTS)
    assert result(tmp_path) == WEIGHTS


def test_a_source_that_brings_nothing_is_given_up(tmp_path: Path) -> None:
    origin = ScriptedOrigin(cuts=[0] * 20)
    with pytest.raises(SourceFailed, match="cut"):
        download(origin, tmp_path)
    assert len(origin.reads) == LIMITS.max_attempts


def test_a_source_that_brings_a_little_each_time_is_not(tmp_path: Path) -> None:
    origin = ScriptedOrigin(cuts=[700] * 10)
    download(origin, tmp_path)
    assert result(tmp_path) == WEIGHTS


def test_a_body_that_ends_early_without_an_error_is_noticed(tmp_path: Path) -> None:
    origin = ScriptedOrigin(WEIGHTS[:5000])
    # One worker, because of several failing parts any may be given up first.
    with pytest.raises(SourceFailed, match="broke off after 904 of 4096 bytes"):
        download(origin, tmp_path, limits=replace(LIMITS, num_workers=1))


def test_a_body_that_is_longer_than_asked_for_is_not_taken(tmp_path: Path) -> None:
    class Generous(ScriptedOrigin):
        def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
            yield content + b"more" * 5000

    download(Generous(), tmp_path)
    assert result(tmp_path) == WEIGHTS


def test_an_endless_body_is_cut_at_the_limit(tmp_path: Path) -> None:
    class Endless(ScriptedOrigin):
        def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
            yield WEIGHTS
            while True:
                yield b"x" * 1000

    file = RemoteFile(path="x", size_bytes=None, validator=None, can_seek=False)
    with pytest.raises(SourceRefused, match="at most 50000"):
        download(Endless(), tmp_path, file=file, max_bytes=50_000)
    assert len(result(tmp_path)) <= 50_000


def test_a_file_of_unknown_size_ends_where_its_body_does(tmp_path: Path) -> None:
    file = RemoteFile(path="x", size_bytes=None, validator=None, can_seek=False)
    received = download(ScriptedOrigin(), tmp_path, file=file)
    assert result(tmp_path) == WEIGHTS
    assert received[-1] == Progress(len(WEIGHTS), None)


def test_nothing_of_a_longer_body_that_broke_off_stays_behind_a_shorter_one(
    tmp_path: Path,
) -> None:
    bodies = iter([WEIGHTS + b"x" * 5000, WEIGHTS])

    class Shrinking(ScriptedOrigin):
        def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
            yield next(bodies)
            if cut is not None:
                raise SourceFailed("cut")

    file = RemoteFile(path="x", size_bytes=None, validator=None, can_seek=False)
    download(Shrinking(cuts=[1]), tmp_path, file=file)
    assert result(tmp_path) == WEIGHTS


def test_a_file_with_wrong_first_bytes_is_not_read_further(tmp_path: Path) -> None:
    origin = ScriptedOrigin(b"PK\x03\x04" + b"x" * (len(WEIGHTS) - 4))
    with pytest.raises(SourceRefused) as refused:
        download(origin, tmp_path)
    assert refused.value.code == "archive"
    assert len(origin.reads) == 1


def test_parts_are_read_side_by_side(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)

    class Meeting(ScriptedOrigin):
        def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
            if content != WEIGHTS[:4096]:
                both.wait()
            yield content

    download(Meeting(), tmp_path, limits=replace(LIMITS, num_workers=2))
    assert result(tmp_path) == WEIGHTS


def test_a_part_that_fails_for_good_stops_the_others(tmp_path: Path) -> None:
    class Refusing(ScriptedOrigin):
        def chunks(self, content: bytes, cut: int | None) -> Iterator[bytes]:
            if content == WEIGHTS[4096:8192]:
                raise SourceFailed("no", is_temporary=False)
            yield content

    origin = Refusing()
    limits = replace(LIMITS, num_workers=1, part_bytes=4096)
    with pytest.raises(SourceFailed, match="no"):
        download(origin, tmp_path, limits=limits)
    assert origin.reads == [(0, 4096), (4096, 8192)]


REMOTE = RemoteFile(path="x", size_bytes=10, validator='"1"')


def open_partial(staging: Staging, file: RemoteFile = REMOTE, source: str = "s") -> PartialFile:
    return staging.open("x", file, source=source)


def fill_half(staging: Staging, file: RemoteFile = REMOTE) -> None:
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
        (REMOTE, "another source"),
    ],
)
def test_a_partial_file_of_other_content_is_not_resumed(
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
