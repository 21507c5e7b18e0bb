from __future__ import annotations

import torch

from loramux.memory.pool import PagePool, copy_pairs
from loramux.types.model import PagedLayout

GEOMETRY = PagedLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=2)


def make_pool(num_pages: int = 5) -> PagePool:
    return PagePool(
        num_pages=num_pages,
        geometry=GEOMETRY,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_a_page_holds_the_keys_and_values_of_its_tokens_in_every_layer() -> None:
    assert GEOMETRY.page_elements == 2 * 2 * 2 * 1 * 4
    assert make_pool().page_bytes == GEOMETRY.page_elements * 4


def test_a_buffer_comes_back_from_scattered_pages_and_neighbours_are_untouched() -> None:
    pool = make_pool()
    width = GEOMETRY.page_elements
    buffer = torch.arange(2 * width + 3, dtype=torch.float32) + 1
    pool.write([4, 0, 2], buffer)
    out = torch.empty(3 * width)
    pool.read([4, 0, 2], out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
    assert not pool.storage[[1, 3]].any()


def test_slices_that_end_within_pages_make_the_whole() -> None:
    pool = make_pool()
    width = GEOMETRY.page_elements
    buffer = torch.arange(2 * width + 3, dtype=torch.float32) + 1
    data = buffer.view(torch.uint8).numpy().data
    # Neither page nor element ends where these do.
    for start in range(0, len(data), 51):
        pool.write_slice([4, 0, 2], start, data[start : start + 51])
    out = torch.empty(3 * width)
    pool.read([4, 0, 2], out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
    assert not pool.storage[[1, 3]].any()


def test_whole_pages_only_and_less_than_a_page() -> None:
    pool = make_pool()
    width = GEOMETRY.page_elements
    for size in (width, 5):
        buffer = torch.rand(size)
        pool.write([3], buffer)
        out = torch.empty(width)
        pool.read([3], out)
        assert torch.equal(out[:size], buffer)


def test_values_are_copied_as_they_are_in_a_dtype_that_numpy_has_not() -> None:
    pool = PagePool(
        num_pages=3, geometry=GEOMETRY, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    buffer = torch.randn(GEOMETRY.page_elements + 1).to(torch.bfloat16)
    pool.write([1, 2], buffer)
    assert torch.equal(pool.storage[1:].flatten()[: buffer.numel()], buffer)


def test_a_cleared_page_keeps_nothing_of_its_last_owner() -> None:
    pool = make_pool()
    pool.storage.fill_(float("nan"))
    pool.clear([1, 3])
    assert not pool.storage[[1, 3]].any()
    assert pool.storage[[0, 2, 4]].isnan().all()


def test_pages_for_elements_rounds_up() -> None:
    pool = make_pool()
    width = GEOMETRY.page_elements
    assert [pool.pages_for_elements(n) for n in (1, width, width + 1)] == [1, 1, 2]


def test_neighbouring_pages_are_copied_at_once_and_all_arrive() -> None:
    pool = make_pool(8)
    width = GEOMETRY.page_elements
    buffer = torch.arange(4 * width + 3, dtype=torch.float32) + 1
    page_ids = [2, 3, 4, 7, 0]
    pairs = copy_pairs(pool.storage, page_ids, buffer)
    assert [source.numel() for _, source in pairs] == [3 * width, width, 3]
    for target, source in pairs:
        target.copy_(source)
    out = torch.empty(5 * width)
    pool.read(page_ids, out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
