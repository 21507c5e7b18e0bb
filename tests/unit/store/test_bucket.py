from __future__ import annotations

import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import pytest

from loramux.errors import LoramuxError, SourceFailed, SourceForbidden, SourceRefused
from loramux.sources.config import Secret, SourceConfig
from loramux.store.bucket import ObjectTier
from loramux.store.store import ContentStore
from tests.fault_server import Answer, Fault, FaultServer
from tests.store_factory import tiny_weights, write_tiny
from tests.unit.sources.source_factory import IMPATIENT, FakeTime

KEY = "blobs/" + "a" * 64
CONTENT = b"0123456789" * 1000


@pytest.fixture
def url() -> str:
    return f"s3://adapters/tier/{uuid4().hex}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def make_tier(url: str, config: SourceConfig) -> ObjectTier:
    return ObjectTier(url, config, timing=FakeTime().timing)


def test_an_uploaded_object_is_found(
    url: str, s3_config: SourceConfig, file: Path, tmp_path: Path
) -> None:
    tier = make_tier(url, s3_config)
    assert not tier.has(KEY)
    assert not tier.get(KEY, tmp_path / "copy", max_bytes=10**6)
    tier.put(KEY, file)
    assert tier.has(KEY)
    assert tier.get(KEY, tmp_path / "copy", max_bytes=len(CONTENT))
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert not make_tier(f"{url}/other", s3_config).has(KEY), "prefixes do not share keys"


def test_objects_over_max_bytes_are_not_written(
    url: str, s3_config: SourceConfig, file: Path, tmp_path: Path
) -> None:
    tier = make_tier(url, s3_config)
    tier.put(KEY, file)
    assert not tier.get(KEY, tmp_path / "copy", max_bytes=len(CONTENT) - 1)
    assert not (tmp_path / "copy").exists()


def test_temporary_failures_are_retried(
    url: str,
    s3_proxy: FaultServer,
    s3_proxy_config: SourceConfig,
    file: Path,
    tmp_path: Path,
) -> None:
    tier = make_tier(url, replace(s3_proxy_config, limits=IMPATIENT))
    s3_proxy.faults = [
        Fault(method="PUT", answer=Answer(status=500)),
        Fault(method="HEAD", answer=Answer(status=503)),
        Fault(method="GET", cut_at=100),
        Fault(method="GET", is_silent=True),
    ]
    tier.put(KEY, file)
    assert tier.has(KEY)
    assert tier.get(KEY, tmp_path / "copy", max_bytes=10**6)
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert s3_proxy.faults == []


def test_an_unreachable_bucket_is_not_an_absent_key(
    url: str, s3_config: SourceConfig, file: Path, tmp_path: Path
) -> None:
    away = replace(s3_config, s3=replace(s3_config.s3, endpoint="http://127.0.0.1:9"))
    tier = make_tier(url, away)
    for action in (
        lambda: tier.has(KEY),
        lambda: tier.put(KEY, file),
        lambda: tier.get(KEY, tmp_path / "copy", max_bytes=1),
    ):
        with pytest.raises(SourceFailed, match="could not be reached"):
            action()


def test_wrong_keys_are_a_clear_error_that_does_not_show_them(
    url: str, s3_config: SourceConfig
) -> None:
    wrong = replace(s3_config, s3=replace(s3_config.s3, secret_access_key=Secret("wrong-key")))
    tier = make_tier(url, wrong)
    with pytest.raises(SourceForbidden) as refused:
        tier.has(KEY)
    assert "wrong-key" not in str(refused.value) + repr(tier)
    assert url in repr(tier)


def test_only_a_bucket_can_be_a_tier(s3_config: SourceConfig) -> None:
    with pytest.raises(SourceRefused, match="does not name a bucket"):
        ObjectTier("https://example.com/x", s3_config)


def test_an_adapter_pushed_on_one_machine_is_loaded_on_another(
    url: str, s3_config: SourceConfig, tmp_path: Path
) -> None:
    first = ContentStore(tmp_path / "first", tiers=[make_tier(url, s3_config)])
    cid = first.put_folder(write_tiny(tmp_path / "adapter"))
    second = ContentStore(tmp_path / "second", tiers=[make_tier(url, s3_config)])
    assert not second.has(cid)
    loaded = second.materialize(cid) / "adapter_model.safetensors"
    assert loaded.read_bytes() == tiny_weights(0)
    assert second.verify().damage == ()


@pytest.mark.parametrize("content", [tiny_weights(0)[:-1], tiny_weights(1), b""])
def test_a_truncated_or_wrong_object_is_never_loaded(
    url: str, s3_config: SourceConfig, tmp_path: Path, content: bytes
) -> None:
    tier = make_tier(url, s3_config)
    first = ContentStore(tmp_path / "first", tiers=[tier])
    cid = first.put_folder(write_tiny(tmp_path / "adapter"))
    (tmp_path / "bad").write_bytes(content)
    tier.put(f"blobs/{sha256(tiny_weights(0)).hexdigest()}", tmp_path / "bad")
    second = ContentStore(tmp_path / "second", tiers=[tier])
    with pytest.raises(LoramuxError):
        second.materialize(cid)
    assert not second.has(cid)


def test_a_folder_is_listed_and_emptied_without_its_neighbours(
    url: str, s3_config: SourceConfig, file: Path
) -> None:
    tier, neighbour = make_tier(url, s3_config), make_tier(f"{url}-too", s3_config)
    for each in (tier, neighbour):
        each.put(KEY, file)
        each.put("records/b", file)
    found = tier.objects()
    assert {one.key for one in found} == {KEY, "records/b"}
    assert {one.size_bytes for one in found} == {len(CONTENT)}
    assert all(abs(one.modified_at - time.time()) < 3600 for one in found), "not seconds"
    tier.delete([KEY, "records/b"])
    tier.delete([KEY])
    tier.delete([])
    assert tier.objects() == [] and len(neighbour.objects()) == 2
