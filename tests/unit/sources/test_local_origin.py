from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.errors import SourceChanged, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.origins.local import LocalOrigin, find_under_roots, open_under_root
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
    with pytest.raises(SourceNotFound, match="cannot be read"), origin.read(file, 0, 10):
        pass


def test_errors_of_a_consumer_of_a_local_file_are_not_translated(origin: LocalOrigin) -> None:
    file = origin.find("file")
    assert file is not None
    with pytest.raises(OSError, match="own disk"), origin.read(file, 0, 10):
        raise OSError(5, "the reader's own disk")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return tmp_path / "root"


def test_absolute_and_relative_paths_are_found_under_any_root(root: Path, tmp_path: Path) -> None:
    roots = (tmp_path / "missing", root)
    assert find_under_roots(Path("a"), roots) == (root, root / "a")
    assert find_under_roots(root / "a", roots) == (root, root / "a")


def test_links_inside_a_root_are_followed(root: Path) -> None:
    (root / "link").symlink_to(root / "a")
    assert find_under_roots(Path("link"), (root,)) == (root, root / "a")


def test_a_root_that_is_a_link_is_meant_where_it_leads(root: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(root)
    assert find_under_roots(Path("a"), (tmp_path / "linked",)) == (root, root / "a")


@pytest.mark.parametrize("target", ["outside", "nowhere", "outside/secret"])
def test_links_out_of_the_root_are_refused(root: Path, tmp_path: Path, target: str) -> None:
    (root / "link").symlink_to(tmp_path / target)
    with pytest.raises(SourceForbidden, match="outside the allowed roots"):
        find_under_roots(Path("link"), (root,))
    with pytest.raises(SourceForbidden, match="outside the allowed roots"):
        find_under_roots(Path("link/x"), (root,))


def test_refusals_outside_the_roots_reveal_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "present").mkdir()
    texts = set()
    for name in ("present", "missing"):
        with pytest.raises(SourceForbidden) as refused:
            find_under_roots(tmp_path / name, (root,))
        texts.add(str(refused.value).replace(name, "X"))
    assert len(texts) == 1


def test_what_is_missing_under_a_root_is_not_found(root: Path) -> None:
    with pytest.raises(SourceNotFound, match="hf:owner/name"):
        find_under_roots(Path("acme/pirate"), (root,))


def test_without_roots_nothing_is_read() -> None:
    with pytest.raises(SourceForbidden, match="no root is allowed"):
        find_under_roots(Path("/etc"), ())


def test_a_loop_of_links_is_refused(root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(SourceRefused):
        find_under_roots(Path("loop/x"), (root,))
    with pytest.raises(SourceRefused):
        find_under_roots(Path("loop"), (root,))


def test_a_file_is_opened(root: Path) -> None:
    (root / "a" / "file").write_text("hello")
    with open_under_root(root, root / "a" / "file") as reader:
        assert reader.read() == b"hello"


def test_a_folder_replaced_by_a_link_after_the_check_is_not_followed(
    root: Path, tmp_path: Path
) -> None:
    path = root / "a" / "secret"
    (root / "a").rmdir()
    (root / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="Not a directory|Too many levels"):
        open_under_root(root, path)


def test_a_file_replaced_by_a_link_after_the_check_is_not_followed(
    root: Path, tmp_path: Path
) -> None:
    (root / "a" / "file").symlink_to(tmp_path / "outside" / "secret")
    with pytest.raises(OSError, match="Too many levels"):
        open_under_root(root, root / "a" / "file")


def test_a_pipe_does_not_block_and_is_refused(root: Path) -> None:
    os.mkfifo(root / "a" / "pipe")
    with pytest.raises(SourceRefused, match="not a regular file"):
        open_under_root(root, root / "a" / "pipe")
