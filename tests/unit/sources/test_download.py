from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.errors import SourceFailed, SourceRefused
from loramux.sources.config import FetchLimits
from loramux.sources.download import Download, Meter, Progress, Staging
from loramux.sources.origins.base import RemoteFile
from loramux.sources.retry import Deadline
from tests.unit.sources.source_factory import WEIGHTS, WEIGHTS_NAME, FakeTime

LIMITS = FetchLimits(max_attempts=3, part_bytes=4096)
FILE = RemoteFile(path="x", size_bytes=len(WEIGHTS), validator='"1"')


class ScriptedOrigin:
    """Gives at most so many bytes a read before it fails; then the rest."""

    revision = None

    def __init__(self, content: bytes = WEIGHTS, cuts: list[int] | None = None) -> None:
        self.content = content
        self.cuts = list(cuts or [])
        self.reads: list[tuple[int, int | None]] = []
        self._lock = threading.Lock()

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


# Few: every part is put on the disk.
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
    # One by one: of several that break off, any may be the first to be given up.
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


def test_nothing_more_is_read_of_what_its_first_bytes_give_away(tmp_path: Path) -> None:
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
