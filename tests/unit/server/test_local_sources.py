"""Sources that a request names: folders under the roots, and ids of other places."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import SourceForbidden, SourceNotFound
from loramux.server.local_sources import fetched_folder, is_remote, local_folder
from tests.store_factory import write_tiny


def test_a_folder_under_a_root_is_used_in_place(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    with fetched_folder("a", [str(tmp_path)]) as found:
        assert found == folder.resolve()
    with pytest.raises(SourceNotFound):
        local_folder("b", [str(tmp_path)])


def test_no_root_means_no_folder() -> None:
    with pytest.raises(SourceForbidden, match="no root is allowed"), fetched_folder("/tmp", []):
        pass


def test_another_place_is_fetched_only_where_it_is_allowed() -> None:
    assert is_remote("s3://bucket/a") and is_remote("hf:owner/name") and not is_remote("a/b")
    with (
        pytest.raises(SourceForbidden, match="allowed hosts"),
        fetched_folder("http://169.254.169.254/a", []),
    ):
        pass
