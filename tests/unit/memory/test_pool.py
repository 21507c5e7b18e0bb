from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loramux.adapters.packed.paged import page_bytes_of
from loramux.memory.pool import PagePool, copy_pairs
from loramux.types.kv import KVLayout

WIDTH = 32
"""Floats of a page."""


def make_pool(num_pages: int = 5) -> PagePool:
    return PagePool(num_pages, 4 * WIDTH, torch.device("cpu"))


def floats(pool: PagePool) -> torch.Tensor:
    return pool.view(torch.float32).storage


def test_a_page_holds_the_keys_and_values_of_its_tokens_in_every_layer() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=2)
    assert layout.num_elements == 2 * 2 * 2 * 1 * 4
    assert layout.page_bytes == 4 * layout.num_elements
    half = replace(layout, dtype="float16")
    assert half.page_bytes == layout.page_bytes // 2 == 2 * half.token_bytes
    scaled = replace(half, scale_bytes=2)
    assert scaled.page_bytes == half.page_bytes + 2 * (2 * 2 * 2 * 1)


def test_one_page_is_read_as_several_dtypes() -> None:
    pool = make_pool(2)
    pool.write([1], torch.full((WIDTH,), 3.0))
    pool.write([0], torch.full((2 * WIDTH,), 5.0, dtype=torch.bfloat16))
    assert pool.num_bytes == 2 * 4 * WIDTH
    assert pool.view(torch.bfloat16).width == 2 * WIDTH
    assert (pool.view(torch.bfloat16).storage[0] == 5).all()
    assert (floats(pool)[1] == 3).all()


@pytest.mark.parametrize(
    ("kv_bytes", "element_bytes", "packing", "expected"),
    [(4096, 2, "dense", 4096), (4096, 2, "paged", 4096), (4098, 4, "dense", 4100)]
    + [(4098, 4, "paged", 4352), (130, 2, "paged", 256)],
)
def test_pages_are_whole_units_of_addresses(
    kv_bytes: int, element_bytes: int, packing: Any, expected: int
) -> None:
    assert page_bytes_of(kv_bytes, element_bytes, packing) == expected


def test_a_buffer_comes_back_from_scattered_pages_and_neighbours_are_untouched() -> None:
    pool = make_pool()
    width = WIDTH
    buffer = torch.arange(2 * width + 3, dtype=torch.float32) + 1
    pool.write([4, 0, 2], buffer)
    out = torch.empty(3 * width)
    pool.view(torch.float32).read([4, 0, 2], out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
    assert not floats(pool)[[1, 3]].any()


def test_slices_that_end_within_pages_make_the_whole() -> None:
    pool = make_pool()
    width = WIDTH
    buffer = torch.arange(2 * width + 3, dtype=torch.float32) + 1
    data = buffer.view(torch.uint8).numpy().data
    # Neither page nor element ends where these do.
    for start in range(0, len(data), 51):
        pool.write_slice([4, 0, 2], start, data[start : start + 51])
    out = torch.empty(3 * width)
    pool.view(torch.float32).read([4, 0, 2], out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
    assert not floats(pool)[[1, 3]].any()


def test_whole_pages_only_and_less_than_a_page() -> None:
    pool = make_pool()
    width = WIDTH
    for size in (width, 5):
        buffer = torch.rand(size)
        pool.write([3], buffer)
        out = torch.empty(width)
        pool.view(torch.float32).read([3], out)
        assert torch.equal(out[:size], buffer)


def test_values_are_copied_as_they_are_in_a_dtype_that_numpy_has_not() -> None:
    pool = make_pool(3)
    buffer = torch.randn(2 * WIDTH + 1).to(torch.bfloat16)
    pool.write([1, 2], buffer)
    found = pool.view(torch.bfloat16).storage[1:].flatten()[: buffer.numel()]
    assert torch.equal(found, buffer)


def test_a_cleared_page_keeps_nothing_of_its_last_owner() -> None:
    pool = make_pool()
    floats(pool).fill_(float("nan"))
    pool.clear([1, 3])
    assert not floats(pool)[[1, 3]].any()
    assert floats(pool)[[0, 2, 4]].isnan().all()


def test_pages_for_elements_round_up() -> None:
    pages = make_pool().view(torch.float32)
    assert [pages.pages_for(n) for n in (1, WIDTH, WIDTH + 1)] == [1, 1, 2]
    assert pages.address(2) - pages.address(1) == 4 * WIDTH


def test_neighbouring_pages_are_copied_at_once_and_all_arrive() -> None:
    pool = make_pool(8)
    width = WIDTH
    buffer = torch.arange(4 * width + 3, dtype=torch.float32) + 1
    page_ids = [2, 3, 4, 7, 0]
    pairs = copy_pairs(floats(pool), page_ids, buffer)
    assert [source.numel() for _, source in pairs] == [3 * width, width, 3]
    for target, source in pairs:
        target.copy_(source)
    out = torch.empty(5 * width)
    pool.view(torch.float32).read(page_ids, out)
    assert torch.equal(out[: buffer.numel()], buffer)
    assert not out[buffer.numel() :].any()
