from __future__ import annotations

from pathlib import Path

from loramux.store.redis import RedisTier
from loramux.store.tiers import RemoteTier, blob_key, record_key
from tests.store_factory import FolderTier


def test_keys_of_bytes_and_of_adapters_never_meet() -> None:
    digest = "a" * 64
    assert blob_key(digest) == f"blobs/{digest}"
    assert record_key(digest) == f"records/{digest}"


def test_the_tiers_have_the_shape(tmp_path: Path) -> None:
    tiers: list[type[RemoteTier]] = [RedisTier, FolderTier]
    for tier in tiers:
        assert all(callable(getattr(tier, name)) for name in ("has", "get", "put"))
