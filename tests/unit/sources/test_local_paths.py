from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.errors import SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.origins.local import find_under_roots, open_under_root


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


def test_outside_nobody_learns_what_is_there(root: Path, tmp_path: Path) -> None:
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
