"""What the server writes is for its own user alone, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.base.private_files import explaining, make_private_folder
from loramux.errors import LoramuxError
from loramux.registry.database import Database
from loramux.registry.registry import Registry
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from tests.store_factory import write_tiny


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.rglob("*")]
    return {str(path): stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths}


def test_registry_and_store_are_private(tmp_path: Path) -> None:
    data = tmp_path / "new" / "data"
    registry = Registry(data / "registry.db")
    library = AdapterLibrary(ContentStore(data / "store"), registry)
    pushed = library.push(write_tiny(tmp_path / "a", 1), "acme/sql@1.0.0")
    library.materialize(pushed.cid)
    found = modes(tmp_path / "new")
    assert any(name.endswith(".safetensors") for name in found), "there is nothing to check"
    assert {name: mode for name, mode in found.items() if mode} == {}


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path / "a" / "b")
    kept = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, tmp_path / "a")]
    assert kept == [0o755, 0o700]


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "registry.db"
    with pytest.raises(LoramuxError, match=r"registry\.db cannot be used: .*--registry"):
        Database(path)
    with pytest.raises(LoramuxError, match="store cannot be used: .*LORAMUX_DATA"):
        ContentStore(tmp_path / "file" / "store")
    with pytest.raises(LoramuxError, match="--disk-folder"), explaining(path, "--disk-folder"):
        make_private_folder(path)
