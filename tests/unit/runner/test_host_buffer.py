from __future__ import annotations

import torch

from loramux.runner.host_buffer import HostBuffer

CPU = torch.device("cpu")


def test_fields_are_aligned_and_the_last_may_be_sent_in_part() -> None:
    words = HostBuffer([3, 5, 8], CPU, num_ahead=16)
    words.begin()
    for field in words.host:
        field[:] = 7
    words.send(2)
    assert [field.tolist() for field in words.fields] == [[7] * 16, [7] * 16, [7, 7, *[0] * 6]]
    assert words.all[:16].tolist() == [0] * 16
    assert all(field.data_ptr() % 64 == words.all.data_ptr() % 64 for field in words.fields)


def test_a_step_is_filled_while_the_device_still_reads_the_last() -> None:
    words = HostBuffer([1, 1], CPU)
    words.begin()
    first = words.host[0]
    words.begin()
    assert first.base is not words.host[0].base
    words.begin()
    assert first.base is words.host[0].base
