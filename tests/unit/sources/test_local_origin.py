from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import SourceFailed, SourceForbidden
from loramux.sources.origins.base import SourceChanged
from loramux.sources.origins.local import LocalOrigin
from loramux.sources.source_id import SourceId, SourceKind


@pytest.fixture
def origin(tmp_path: Path) -> LocalOrigin:
    (tmp_path / "root" / "pirate").mkdir(parents=True)
    (tmp_path / "root" / "pirate" / "file").write_bytes(b"0123456789")
    (tmp_path / "secret").write_text("secret")
    root = str(tmp_path / "root")
    return LocalOrigin(SourceId(kind=SourceKind.LOCAL, place=root, folder=("pirate",)))


def test_a_range_of_a_file_is_read(origin: LocalOrigin) -> None:
    file = origin.find("file")
    assert file is not None
    assert file.size_bytes == 10
    with origin.read(file, 4, None) as chunks:
        assert b"".join(chunks) == b"456789"


def test_what_is_missing_is_none(origin: LocalOrigin) -> None:
    assert origin.find("other") is None
    assert origin.revision is None


def test_a_file_that_links_out_of_the_root_is_refused(origin: LocalOrigin, tmp_path: Path) -> None:
    (tmp_path / "root" / "pirate" / "leak").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceForbidden, match="outside the allowed roots"):
        origin.find("leak")


def test_a_link_within_the_root_is_followed(origin: LocalOrigin, tmp_path: Path) -> None:
    (tmp_path / "root" / "blob").write_bytes(b"blob")
    (tmp_path / "root" / "pirate" / "link").symlink_to(tmp_path / "root" / "blob")
    file = origin.find("link")
    assert file is not None
    with origin.read(file, 0, 4) as chunks:
        assert b"".join(chunks) == b"blob"


def test_a_file_that_was_replaced_is_noticed(origin: LocalOrigin, tmp_path: Path) -> None:
    file = origin.find("file")
    assert file is not None
    (tmp_path / "root" / "pirate" / "file").write_bytes(b"other")
    with pytest.raises(SourceChanged), origin.read(file, 0, 10):
        pass


def test_a_file_replaced_by_a_link_to_a_secret_is_not_read(
    origin: LocalOrigin, tmp_path: Path
) -> None:
    file = origin.find("file")
    assert file is not None
    (tmp_path / "root" / "pirate" / "file").unlink()
    (tmp_path / "root" / "pirate" / "file").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceFailed, match="cannot be read"), origin.read(file, 0, 10):
        pass


def test_a_reader_who_fails_is_not_blamed_on_the_source(origin: LocalOrigin) -> None:
    file = origin.find("file")
    assert file is not None
    with pytest.raises(OSError, match="own disk"), origin.read(file, 0, 10):
        raise OSError(5, "the reader's own disk")
