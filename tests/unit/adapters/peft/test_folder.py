from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.peft.folder import find_file, open_folder, open_real, refusing_os_errors
from loramux.errors import AdapterNotFound, AdapterRefused


def refusal_of(folder: Path, name: str) -> str:
    with pytest.raises(AdapterRefused) as refused:
        find_file(folder, name)
    return refused.value.code


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        open_folder(tmp_path / "gone")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterNotFound):
        open_folder(tmp_path / "file")


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    real = tmp_path / "v1"
    real.mkdir()
    (real / "x").touch()
    (tmp_path / "current").symlink_to(real)
    assert find_file(open_folder(tmp_path / "current"), "x") == real.resolve() / "x"


def test_an_absent_file_is_none(tmp_path: Path) -> None:
    assert find_file(tmp_path, "x") is None


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "x").symlink_to("real")
    assert find_file(tmp_path.resolve(), "x") == tmp_path.resolve() / "real"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "x").symlink_to("../secret")
    assert refusal_of(folder.resolve(), "x") == "link_outside"


def hub_folder(cache: Path, blobs: str = "blobs") -> Path:
    """Make a folder like huggingface_hub's snapshot_download."""
    model = cache / "models--owner--lora"
    folder = model / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (model / blobs).mkdir()
    (model / blobs / "digest").touch()
    (folder / "x").symlink_to(f"../../{blobs}/digest")
    return folder.resolve()


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    assert find_file(hub_folder(tmp_path), "x") is not None


def test_a_hub_folder_may_link_to_blobs_only(tmp_path: Path) -> None:
    assert refusal_of(hub_folder(tmp_path, blobs="elsewhere"), "x") == "link_outside"


def test_a_blob_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path)
    blob = folder.parent.parent / "blobs" / "digest"
    (tmp_path / "secret").touch()
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    assert refusal_of(folder, "x") == "link_outside"


def test_an_os_error_becomes_a_refusal() -> None:
    expected = pytest.raises(AdapterRefused, match="x cannot be read: Permission denied")
    with expected, refusing_os_errors(Path("x")):
        raise PermissionError(13, "Permission denied")


def test_a_file_is_opened_at_its_real_path_alone(tmp_path: Path) -> None:
    """Between a check and the opening, a folder or the file may have become a link."""
    inside, outside = tmp_path / "root" / "a", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "x").write_text(folder.name)
    with open_real(inside / "x") as file:
        assert file.read() == b"a"
    inside.rename(tmp_path / "root" / "b")
    inside.symlink_to(outside)
    with pytest.raises(OSError):
        open_real(inside / "x")
    (outside / "y").symlink_to(outside / "x")
    with pytest.raises(OSError):
        open_real(outside / "y")
