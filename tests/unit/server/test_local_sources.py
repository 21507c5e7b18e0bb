"""Sources of adapters: folders under the roots, and remote sources."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loramux.errors import SourceForbidden, SourceNotFound
from loramux.server.naming.sources import fetched_folder, local_folder
from loramux.sources.config import HttpConfig, SourceConfig
from loramux.sources.parse import is_remote
from tests.fault_server import FaultServer
from tests.store_factory import write_tiny
from tests.unit.sources.source_factory import WEIGHTS, adapter_files


def test_a_folder_under_a_root_is_copied_so_that_no_link_takes_its_place(tmp_path: Path) -> None:
    folder, other = write_tiny(tmp_path / "root" / "a", 1), write_tiny(tmp_path / "other", 2)
    content = (folder / "adapter_model.safetensors").read_bytes()
    with fetched_folder("a", [str(tmp_path / "root")], SourceConfig(), tmp_path / "fetch") as found:
        shutil.rmtree(folder)
        folder.symlink_to(other)
        assert (found / "adapter_model.safetensors").read_bytes() == content
    with pytest.raises(SourceNotFound):
        local_folder("b", [str(tmp_path / "root")])


def test_without_roots_no_folder_is_allowed(tmp_path: Path) -> None:
    with (
        pytest.raises(SourceForbidden, match="no root is allowed"),
        fetched_folder("/tmp", [], SourceConfig(), tmp_path / "fetch"),
    ):
        pass


def test_a_remote_source_is_fetched_only_if_allowed(tmp_path: Path) -> None:
    assert is_remote("s3://bucket/a") and is_remote("hf:owner/name") and not is_remote("a/b")
    with (
        pytest.raises(SourceForbidden, match="allowed hosts"),
        fetched_folder("http://169.254.169.254/a", [], SourceConfig(), tmp_path / "fetch"),
    ):
        pass


def test_a_private_host_needs_its_own_list(
    tmp_path: Path,
) -> None:
    with FaultServer(adapter_files("pirate")) as web:
        url = f"{web.url}/pirate"
        public = SourceConfig(http=HttpConfig(allowed_hosts=(web.host,)))
        with (
            pytest.raises(SourceForbidden, match="private"),
            fetched_folder(url, [], public, tmp_path / "fetch"),
        ):
            pass
        private = SourceConfig(http=HttpConfig(private_hosts=(web.host,)))
        with fetched_folder(url, [], private, tmp_path / "fetch") as found:
            assert (found / "adapter_model.safetensors").read_bytes() == WEIGHTS
        assert not found.exists()
