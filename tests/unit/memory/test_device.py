from __future__ import annotations

import resource

import pytest
import torch

from loramux.memory.device import (
    GraphMaker,
    device_memory_bytes,
    device_name,
    is_capturing,
    is_out_of_memory,
    load_library,
    zeros,
)
from loramux.memory.host_memory import total_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_zero_writable_and_of_the_right_type(dtype: torch.dtype) -> None:
    tensor = zeros((3, 5), dtype=dtype, device=CPU)
    assert tensor.shape == (3, 5) and tensor.dtype == dtype and not tensor.any()
    tensor[1] = 2
    assert tensor.sum() == 10


def test_a_pool_takes_no_memory_before_it_is_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = zeros((2**30,), dtype=torch.uint8, device=CPU)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert pool.nbytes == 2**30 and grown_kib < 100 * 1024


def test_free_memory_is_part_of_all_memory() -> None:
    free, total = device_memory_bytes(CPU)
    assert 0 < free <= total == total_memory_bytes()


def test_only_a_lack_of_memory_counts_as_one() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("no room"))
    assert not is_out_of_memory(RuntimeError("out of memory, says somebody else"))


def test_without_a_gpu_a_graph_is_the_function_itself() -> None:
    calls: list[int] = []
    replay = GraphMaker(CPU).make(lambda: calls.append(1))
    assert calls == []
    replay()
    replay()
    assert calls == [1, 1]


def test_without_a_gpu_there_is_no_library_of_its_own_and_no_capture() -> None:
    assert load_library("cublasLt", CPU) is None
    assert not is_capturing()
    assert device_name(CPU) == "cpu"
