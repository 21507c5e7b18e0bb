from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from loramux.errors import AdapterNotFound, AdapterRefused, StoreDamaged
from loramux.store.intake import StoreLimits
from loramux.store.redis import RedisTier
from loramux.store.store import ContentStore
from loramux.store.tiers import RemoteTier, blob_key, record_key
from tests.store_factory import FolderTier, damage, tiny_weights, write_tiny


def test_keys_of_bytes_and_of_adapters_never_meet() -> None:
    digest = "a" * 64
    assert blob_key(digest) == f"blobs/{digest}"
    assert record_key(digest) == f"records/{digest}"


def test_the_tiers_have_the_shape(tmp_path: Path) -> None:
    tiers: list[type[RemoteTier]] = [RedisTier, FolderTier]
    for tier in tiers:
        assert all(callable(getattr(tier, name)) for name in ("has", "get", "put"))


@pytest.fixture
def near(tmp_path: Path) -> FolderTier:
    return FolderTier(tmp_path / "near")


@pytest.fixture
def far(tmp_path: Path) -> FolderTier:
    return FolderTier(tmp_path / "far")


def push(tmp_path: Path, *tiers: FolderTier) -> str:
    store = ContentStore(tmp_path / "first", tiers=tiers)
    return store.put_folder(write_tiny(tmp_path / "adapter", seed=1))


def blob_of(tier: FolderTier, size: int) -> Path:
    return next(p for p in (tier.folder / "blobs").iterdir() if p.stat().st_size == size)


def test_another_machine_gets_the_adapter_from_the_tier(tmp_path: Path, far: FolderTier) -> None:
    cid = push(tmp_path, far)
    other = ContentStore(tmp_path / "second", tiers=[far])
    assert not other.has(cid) and other.is_available(cid)
    view = other.materialize(cid)
    assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(1)
    assert other.has(cid) and other.verify().is_sound
    assert not list((tmp_path / "second" / "staging").iterdir())


def test_a_tier_gets_the_record_last_and_nothing_twice(tmp_path: Path, far: FolderTier) -> None:
    """A reader that sees the record may rely on the files."""
    push(tmp_path, far)
    puts = [key.split("/")[0] for call, key in far.calls if call == "put"]
    assert puts == ["blobs", "blobs", "records"]
    push(tmp_path, far)
    assert sum(call == "put" for call, _ in far.calls) == 3


def test_nearer_tiers_are_filled_from_farther_ones(
    tmp_path: Path, near: FolderTier, far: FolderTier
) -> None:
    cid = push(tmp_path, far)
    ContentStore(tmp_path / "second", tiers=[near, far]).materialize(cid)
    assert near.keys() == far.keys() and len(near.keys()) == 3


def test_a_bad_copy_in_one_tier_is_passed_over(
    tmp_path: Path, near: FolderTier, far: FolderTier, caplog: pytest.LogCaptureFixture
) -> None:
    cid = push(tmp_path, near, far)
    damage(blob_of(near, len(tiny_weights(1))))
    with caplog.at_level(logging.WARNING):
        view = ContentStore(tmp_path / "second", tiers=[near, far]).materialize(cid)
    assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(1)
    assert "bad copy" in caplog.text
    # The fetch has also repaired it.
    assert blob_of(near, len(tiny_weights(1))).read_bytes() == tiny_weights(1)


@pytest.mark.parametrize("how", ["lost", "damaged", "longer"])
def test_an_adapter_that_no_tier_has_completely_is_not_found(
    tmp_path: Path, far: FolderTier, how: str
) -> None:
    cid = push(tmp_path, far)
    blob = blob_of(far, len(tiny_weights(1)))
    if how == "lost":
        blob.unlink()
    elif how == "damaged":
        damage(blob)
    else:
        os.chmod(blob, 0o644)
        blob.write_bytes(blob.read_bytes() + b"more")
    other = ContentStore(tmp_path / "second", tiers=[far])
    with pytest.raises(AdapterNotFound):
        other.materialize(cid)
    assert other.cids() == [] and other.size_bytes() == 0


def test_a_record_that_names_another_config_is_refused(tmp_path: Path, far: FolderTier) -> None:
    """The CID covers the meaning of the config, not its bytes."""
    cid = push(tmp_path, far)
    other_config = write_tiny(tmp_path / "evil", config={"peft_type": "LORA", "r": 64})
    evil = (other_config / "adapter_config.json").read_bytes()
    import hashlib
    import json

    digest = hashlib.sha256(evil).hexdigest()
    (far.folder / "blobs" / digest).write_bytes(evil)
    record = far.folder / "records" / cid.rpartition(":")[2]
    fields = json.loads(record.read_bytes())
    fields["config_file"] = {"sha256": digest, "size": len(evil)}
    record.chmod(0o644)
    record.write_text(json.dumps(fields))
    with pytest.raises(StoreDamaged):
        ContentStore(tmp_path / "second", tiers=[far]).materialize(cid)


def test_limits_hold_for_what_comes_from_a_tier(tmp_path: Path, far: FolderTier) -> None:
    cid = push(tmp_path, far)
    small = ContentStore(tmp_path / "second", tiers=[far], limits=StoreLimits(max_adapter_bytes=50))
    with pytest.raises(AdapterRefused, match="larger than 50"):
        small.materialize(cid)
    assert small.size_bytes() == 0


def test_local_damage_is_repaired_from_a_tier(tmp_path: Path, far: FolderTier) -> None:
    cid = push(tmp_path, far)
    store = ContentStore(tmp_path / "first", tiers=[far])
    for folder in ("blobs/*", "records"):
        for path in (tmp_path / "first").glob(f"{folder}/*"):
            damage(path)
    view = store.materialize(cid)
    assert (view / "adapter_model.safetensors").read_bytes() == tiny_weights(1)
    assert store.verify().is_sound
