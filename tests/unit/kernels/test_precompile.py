"""Kernels are compiled by child processes into Triton's cache; no GPU is needed for that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton on this machine")

from loramux.kernels.gpu import precompile
from loramux.kernels.gpu.precompile import CompiledStamp, KernelCompiler

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(x_ptr, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, x * 2, mask=at < n)
"""
HOPPER = ("cuda", 90, 32)


def specialization(size: int) -> str:
    """Return what Triton's hook reports for a launch with a pointer, an int and a constant."""
    return json.dumps(
        {
            "name": "double",
            "signature": {"x_ptr": "*fp32", "n": "i32", "SIZE": "constexpr"},
            "constant_keys": [[2]],
            "constant_vals": [size],
            "attrs_keys": [[0]],
            "attrs_vals": [[["tt.divisibility", 16]]],
            "options": {"num_warps": 1},
            "key": "",
        }
    )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCompiler]:
    (tmp_path / "tiny_kernel.py").write_text(KERNEL)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(precompile, "current_target", lambda: HOPPER)
    compiler = KernelCompiler(num_processes=1)
    yield compiler
    compiler.close()


@pytest.mark.slow
def test_kernels_are_compiled_once_and_errors_are_returned(
    compiler: KernelCompiler, tmp_path: Path
) -> None:
    for size in (16, 32, 16):
        compiler.submit("tiny_kernel", "double", specialization(size))
    compiler.submit("tiny_kernel", "missing", specialization(16))
    shares: list[float] = []
    errors = compiler.wait(shares.append)
    assert len(errors) == 1 and "missing" in errors[0]
    assert compiler.num_kernels == compiler.num_done == 3
    assert len(list((tmp_path / "cache").rglob("double.cubin"))) == 2
    assert shares == sorted(shares)


def test_a_compiler_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(precompile, "current_target", lambda: HOPPER)
    monkeypatch.setattr(precompile, "_WORKER", "loramux.no_such_module")
    compiler = KernelCompiler(num_processes=1)
    compiler.submit("tiny_kernel", "double", specialization(16))
    assert compiler.wait() == ["the compiler process ended"]
    compiler.close()


def test_a_stamp_is_of_one_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stamp = CompiledStamp("llama, 2048 tokens")
    assert not stamp.exists
    stamp.write()
    assert stamp.exists and CompiledStamp("llama, 2048 tokens").exists
    assert not CompiledStamp("llama, 512 tokens").exists
