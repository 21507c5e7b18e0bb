"""What a push may fetch: the host that was typed, and no private address without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.cli.console import ByteView
from loramux.cli.push import FetchOptions, source_config, source_folder, typed_hosts
from loramux.errors import LoramuxError

OPTIONS = FetchOptions(data=None, max_adapter_bytes=1000, timeout_s=3, num_workers=2)


def test_a_folder_is_used_in_place() -> None:
    with source_folder("some/folder", OPTIONS, ByteView()) as (folder, name):
        assert folder == Path("some/folder")
        assert name == str(Path.cwd() / "some" / "folder"), "it cannot be found from elsewhere"


@pytest.mark.parametrize(
    ("source", "hosts"),
    [
        ("https://example.com/a", ("example.com",)),
        ("http://example.com:8080/a", ("example.com:8080",)),
        ("hf:owner/name", ()),
        ("https://", ()),
        ("https://[broken/a", ()),
    ],
)
def test_the_host_that_was_typed_is_allowed_and_no_other(
    source: str, hosts: tuple[str, ...]
) -> None:
    assert typed_hosts(source) == hosts
    config = source_config(source, OPTIONS)
    assert (config.http.allowed_hosts, config.http.private_hosts) == (hosts, ())
    limits = config.limits
    assert (limits.max_total_bytes, limits.timeout_s, limits.num_workers) == (1000, 3, 2)


@pytest.mark.parametrize("source", ["https://u:hunter2@example.com/a", "https://", "s3://"])
def test_an_odd_id_is_refused_without_being_fetched(source: str, tmp_path: Path) -> None:
    with (
        pytest.raises(LoramuxError) as refused,
        source_folder(source, OPTIONS, ByteView()),
    ):
        pass
    assert "hunter2" not in str(refused.value)
