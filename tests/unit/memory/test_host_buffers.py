from __future__ import annotations

import gc

import torch

from loramux.memory.host_buffers import HostBuffers

KIB, MIB = 2**10, 2**20


def test_a_buffer_has_its_elements_and_can_be_written() -> None:
    buffers = HostBuffers(spare_bytes=0, budget_bytes=MIB)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = buffers.allocate(1000, dtype)
        assert buffer.shape == (1000,) and buffer.dtype == dtype
        assert buffer.fill_(2).sum() == 2000
    assert buffers.allocate(0, torch.float32).numel() == 0


def test_what_one_leaves_is_the_next_ones_of_its_size() -> None:
    buffers = HostBuffers(spare_bytes=64 * KIB, budget_bytes=MIB)
    first = buffers.allocate(4 * KIB, torch.float32)
    address = first.data_ptr()
    view = first[5:]
    del first
    gc.collect()
    assert buffers.num_spare_bytes == 0, "memory was given away that somebody still sees"
    del view
    assert buffers.num_spare_bytes == 16 * KIB
    assert buffers.allocate(2 * KIB, torch.float32).data_ptr() != address
    # By bytes, whatever they are taken for.
    second = buffers.allocate(8 * KIB, torch.bfloat16)
    assert second.data_ptr() == address
    third = buffers.allocate(8 * KIB, torch.bfloat16)
    assert third.data_ptr() != address, "two images share their memory"


def test_no_more_is_kept_than_was_said_and_the_oldest_goes_first() -> None:
    buffers = HostBuffers(spare_bytes=32 * KIB, budget_bytes=MIB)
    in_use = [buffers.allocate(count * KIB, torch.uint8) for count in (12, 16, 16)]
    kept = {buffer.data_ptr() for buffer in in_use[1:]}
    while in_use:
        del in_use[0]
    assert buffers.num_spare_bytes == 32 * KIB
    again = [buffers.allocate(16 * KIB, torch.uint8) for _ in range(2)]
    assert {buffer.data_ptr() for buffer in again} == kept


def test_small_ones_are_all_kept_and_one_that_is_too_large_is_not() -> None:
    buffers = HostBuffers(spare_bytes=32 * KIB, budget_bytes=MIB)
    small, large = buffers.allocate(8 * KIB, torch.uint8), buffers.allocate(64 * KIB, torch.uint8)
    del small
    assert buffers.num_spare_bytes == 8 * KIB
    del large
    assert buffers.num_spare_bytes == 8 * KIB


def test_spares_and_images_stay_within_the_budget_together() -> None:
    """Catches a host tier that takes more than --host-memory says once images come and go."""
    buffers = HostBuffers(spare_bytes=64 * KIB, budget_bytes=64 * KIB)
    kept = buffers.allocate(32 * KIB, torch.uint8)
    gone = [buffers.allocate(16 * KIB, torch.uint8) for _ in range(2)]
    del gone
    assert buffers.num_spare_bytes == 32 * KIB
    another = buffers.allocate(24 * KIB, torch.uint8)
    assert buffers.num_spare_bytes == 0, "8 KiB are left, and a spare has 16"
    del another, kept
    assert buffers.num_spare_bytes == 56 * KIB
