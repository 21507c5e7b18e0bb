from __future__ import annotations

import pytest
import torch

from loramux.adapters.image import AdapterImage, AdapterLayout, Site, plan_layout
from loramux.errors import AdapterRefused
from loramux.memory.pages import PageAllocator
from loramux.memory.pool import KVGeometry, PagePool
from loramux.memory.residency import AdapterResidency

SITES = (Site(name="o", in_features=8, projections=("o_proj",), out_features=(8,)),)


def layout_of_rank(rank: int) -> AdapterLayout:
    return plan_layout(SITES, {(0, "o_proj"): rank})


class NumberedImages:
    """Adapter "3:7" has rank 3 and is filled with 7; "broken" fails to load."""

    def __init__(self) -> None:
        self.num_loads = 0

    def num_elements(self, cid: str) -> int:
        return 1 if cid == "broken" else layout_of_rank(int(cid.split(":")[0])).num_elements

    def load(self, cid: str) -> AdapterImage:
        if cid == "broken":
            raise AdapterRefused("changed_on_disk", "broken")
        self.num_loads += 1
        rank, value = (int(part) for part in cid.split(":"))
        layout = layout_of_rank(rank)
        return AdapterImage(cid, layout, torch.full((layout.num_elements,), float(value)))


def make_residency(num_pages: int) -> tuple[AdapterResidency, PageAllocator, PagePool]:
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
    pool = PagePool(
        num_pages=num_pages, geometry=geometry, dtype=torch.float32, device=torch.device("cpu")
    )
    pages = PageAllocator(num_pages)
    residency = AdapterResidency(pool=pool, pages=pages, images=NumberedImages())
    return residency, pages, pool


def test_an_adapter_takes_pages_for_its_true_rank_only() -> None:
    residency, pages, _ = make_residency(32)
    assert residency.acquire(["1:5"]) and residency.acquire(["4:6"])
    # 16 elements a page; rank r needs r * (8 + 8).
    assert 32 - pages.num_free == 1 + 4
    residency.check_integrity({"1:5": 1, "4:6": 1})


def test_the_least_recently_used_idle_adapter_leaves_first_and_a_leased_one_never() -> None:
    residency, pages, _ = make_residency(4)
    assert all(residency.acquire([cid]) for cid in ("1:1", "1:2", "1:3"))
    residency.release(["1:1", "1:2"])
    assert residency.acquire(["1:1"])
    residency.release(["1:1"])
    assert residency.acquire(["2:9"])
    assert "1:2" not in residency and "1:1" in residency and "1:3" in residency
    assert not residency.acquire(["3:3"])
    assert "1:1" in residency, "a load that cannot succeed must not evict anything"
    pages.check_integrity(residency.claims())


def test_weights_survive_eviction_and_reload() -> None:
    residency, _, pool = make_residency(3)
    for cid, value in (("3:7", 7.0), ("2:8", 8.0), ("3:7", 7.0)):
        assert residency.acquire([cid])
        out = torch.empty(len(residency.resident[cid].page_ids) * 16)
        pool.read(residency.resident[cid].page_ids, out)
        assert (out == value).all()
        residency.release([cid])
    assert residency.num_loads == 3 and residency.num_evictions == 2


@pytest.mark.parametrize("last", ["broken", "9:1"])
def test_all_or_nothing_when_one_of_several_cannot_come(last: str) -> None:
    residency, pages, _ = make_residency(4)
    if last == "broken":
        with pytest.raises(AdapterRefused):
            residency.acquire(["1:1", last])
    else:
        assert not residency.acquire(["1:1", last])
    residency.check_integrity({})
    pages.check_integrity(residency.claims())


def test_a_leased_adapter_cannot_be_evicted() -> None:
    residency, _, _ = make_residency(4)
    residency.acquire(["1:1"])
    with pytest.raises(AssertionError, match="in use"):
        residency.evict("1:1")
