from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux.adapters.packed.packing import DensePacking
from loramux.memory.cost import CostModel
from loramux.memory.disk_tier import DiskTier
from loramux.memory.policies import LruPolicy
from loramux.memory.records import Placement
from tests.memory_factory import SITES, cid_of, image_of

A, B, C = cid_of(1), cid_of(2, rank=3), cid_of(3)
FILE_BYTES = 65536 + 256


def make_tier(folder: Path, num_files: int = 8, dtype: torch.dtype = torch.float32) -> DiskTier:
    placement = Placement()
    return DiskTier(
        folder,
        budget_bytes=num_files * FILE_BYTES,
        packing=DensePacking(SITES, dtype, 64),
        policy=LruPolicy(),
        placement=placement,
        costs=CostModel(placement),
    )


def file_of(folder: Path, cid: str) -> Path:
    return next(folder.glob(f"*/{cid.rpartition(':')[2]}.image"))


def test_an_image_survives_a_restart_bit_for_bit(tmp_path: Path) -> None:
    assert make_tier(tmp_path).put(image_of(B))
    again = make_tier(tmp_path)
    image = again.read(B)
    assert image is not None and image.cid == B
    assert torch.equal(image.buffer, image_of(B).buffer)
    assert image.layout == image_of(B).layout
    assert again.read(A) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "header", "gone"])
def test_a_damaged_file_is_never_served_and_is_removed(tmp_path: Path, damage: str) -> None:
    tier = make_tier(tmp_path)
    tier.put(image_of(A))
    tier.put(image_of(C))
    path = file_of(tmp_path, A)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 4
    elif damage == "cut":
        content = content[:-8]
    elif damage == "other":
        content = bytearray(file_of(tmp_path, C).read_bytes())
    elif damage == "header":
        content[20:60] = b"x" * 40
    path.unlink()
    if damage != "gone":
        path.write_bytes(content)
    assert tier.read(A) is None and A not in tier
    assert not list(tmp_path.glob(f"*/{A.rpartition(':')[2]}.image"))
    assert tier.put(image_of(A)) and tier.read(A) is not None
    assert tier.counters.failures == (damage != "gone")


def test_the_least_recently_used_image_is_evicted_at_the_budget(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, num_files=2)
    for cid in (A, C, cid_of(4)):
        assert tier.put(image_of(cid))
        tier.check_integrity()
    assert len(tier) == 2 and tier.counters.evictions == 1
    assert len(list(tmp_path.glob("*/*.image"))) == 2
    assert len(make_tier(tmp_path, num_files=1)) == 1, "a smaller budget at the next start"


def test_images_of_another_packing_are_not_found(tmp_path: Path) -> None:
    make_tier(tmp_path).put(image_of(A))
    assert make_tier(tmp_path, dtype=torch.bfloat16).read(A) is None


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    make_tier(tmp_path).put(image_of(A))
    partial = file_of(tmp_path, A).with_name(".x.image.1.aa.partial")
    partial.write_bytes(b"half")
    make_tier(tmp_path)
    assert not partial.exists()


def test_a_tier_without_space_takes_nothing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, num_files=0)
    assert not tier.put(image_of(A)) and tier.read(A) is None
    assert not list(tmp_path.iterdir())


def test_a_failed_write_is_counted_and_nothing_is_kept(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    for folder in tmp_path.iterdir():
        folder.rmdir()
    assert not tier.put(image_of(A))
    assert A not in tier and tier.counters.failures == 1
