"""Triton's interpreter as tests/interpreter.py makes it: quicker, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreter import VERSION, quicken

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU's kernels are compiled"
)


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _sums_of_rows(x_ptr, sum_ptr, best_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    x = _doubled(tl.load(x_ptr + row * WIDTH + tl.arange(0, WIDTH)))
    tl.store(sum_ptr + row, tl.sum(x, 0))
    tl.store(best_ptr + row, tl.max(x, 0))


def launch(dtype: torch.dtype, width: int) -> tuple[torch.Tensor, ...]:
    x = torch.arange(3 * width).view(3, width).to(dtype)
    found: tuple[Any, ...] = (torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype))
    _sums_of_rows[(3,)](x, *found, WIDTH=width)
    return x, *found


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("width", [1, 8])
def test_functions_that_call_others_are_right_launch_after_launch(
    dtype: torch.dtype, width: int
) -> None:
    quicken()
    for _ in range(2):
        x, sums, best = launch(dtype, width)
        assert torch.equal(sums, 2 * x.sum(1).to(dtype))
        assert torch.equal(best, 2 * x[:, -1])


@needs_interpreter
def test_after_a_launch_that_failed_the_next_one_is_right() -> None:
    with pytest.raises(Exception, match="power of 2"):
        launch(torch.float32, 3)
    _, sums, _ = launch(torch.float32, 2)
    assert sums.tolist() == [2, 10, 18]


def test_it_is_that_of_the_version_which_the_tests_have() -> None:
    """With another version the patch would silently not apply."""
    pinned = Path(__file__).parents[2].joinpath("constraints.txt").read_text()
    assert f"triton=={VERSION}" in pinned
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert importlib.metadata.version("triton").startswith(VERSION)
