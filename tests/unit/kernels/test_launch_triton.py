"""What launches ask of a device that is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels import launch_triton  # noqa: E402


def test_kernels_wait_for_each_other_without_a_gpu() -> None:
    assert launch_triton.overlap_options("cpu") == {"OVERLAP": False}


def test_the_interpreter_counts_as_several_multiprocessors() -> None:
    assert launch_triton.num_multiprocessors("cpu") > 1
    assert launch_triton.shared_bytes("cpu") == 0, "no kernel that needs much of it"
