"""the fused SwiGLU GEMM, in Triton's interpreter or on a GPU, against the reference."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.gemm import small_m, swiglu
from loramux.kernels.gpu.gemm.swiglu import LAUNCHES, SwigluLaunch  # noqa: E402
from loramux.kernels.ops import ACTIVATIONS  # noqa: E402
from loramux.kernels.reference import elementwise
from tests.unit.kernels.conftest import output_of_compiler  # noqa: E402

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.gpu.gemm.swiglu import LAUNCHES, swiglu_kernel

found = []
for launch in LAUNCHES:
    rows, outputs = launch.max_rows, launch.num_outputs
    known = {
        "INNER": 14336, "INPUTS": 4096, "ACTIVATION": "silu", "ROWS": rows, "N": outputs, "K": 64,
        "STAGES": launch.num_stages, "PDL": True,
    }
    kinds = {
        "x_tiles": f"tensordesc<bf16[{rows},64]>", "out_ptr": "*bf16", "num_rows": "i32",
        "weight_tiles": f"tensordesc<bf16[2,{outputs},64]>",
    }
    signature = kinds | dict.fromkeys(known, "constexpr")
    source = ASTSource(swiglu_kernel, {n: signature[n] for n in swiglu_kernel.arg_names}, known)
    options = {"num_warps": launch.num_warps}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found.append([made.metadata.shared, "wgmma" in made.asm["ptx"]])
print(json.dumps(found))
"""

# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float16, torch.bfloat16] if "LORAMUX_TEST_DEVICE" in os.environ else [torch.float16]
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FEWEST, MOST = small_m.MAX_ROWS + 1, LAUNCHES[-1].max_rows
# (inner, inputs): whole tiles, and neither a multiple of any.
SHAPES = [(128, 64), (100, 200), (24, 8), (200, 456)]


def check(inner: int, x: torch.Tensor, activation: str = "silu") -> None:
    weight = (torch.randn(2 * inner, x.shape[1]) / x.shape[1] ** 0.5).to(x.dtype)
    assert swiglu.supports(x, weight)
    found = swiglu.linear_swiglu(x, weight, activation)
    expected = elementwise.linear_swiglu(x, weight, activation)
    limit = LIMITS[x.dtype]
    torch.testing.assert_close(found, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [FEWEST, 64, 65, MOST])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_swiglu_equal_the_reference(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    inner, num_inputs = shape
    check(inner, torch.randn(num_rows, num_inputs).to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_reference(activation: str) -> None:
    check(40, torch.randn(40, 72).half(), activation)


def test_what_lies_behind_the_rows_does_not_matter() -> None:
    room = torch.full((48, 64), torch.nan, dtype=torch.float16)
    room[:40] = torch.randn(40, 64)
    check(64, room[:40])


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "dtype"),
    [
        (FEWEST - 1, 64, torch.float16),
        (MOST + 1, 64, torch.float16),
        (64, 60, torch.float16),
        (64, 64, torch.float32),
    ],
    ids=str,
)
def test_what_it_is_not_made_for(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight = torch.ones(8, num_inputs, dtype=dtype)
    assert not swiglu.supports(torch.ones(num_rows, num_inputs, dtype=dtype), weight)


def test_rows_and_weights_with_gaps_do_not_fit() -> None:
    x, weight = torch.ones(64, 64).half(), torch.ones(8, 64).half()
    assert swiglu.supports(x, weight)
    assert not swiglu.supports(torch.ones(64, 128).half()[:, :64], weight)
    assert not swiglu.supports(x, torch.ones(16, 64).half()[::2])


def test_a_device_with_too_little_memory_has_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(64, 64).half(), torch.ones(8, 64).half()
    monkeypatch.setattr(swiglu, "shared_bytes", lambda _: 64 * 1024)
    assert not swiglu.supports(x, weight)


def test_launches_are_in_the_order_of_their_rows() -> None:
    most = [launch.max_rows for launch in LAUNCHES]
    assert most == sorted(most)


def test_a_launch_counts_its_stages() -> None:
    launch = SwigluLaunch(max_rows=64, num_outputs=32, num_stages=3, num_warps=4)
    assert launch.shared_bytes == 1024 + 3 * (64 + 2 * 32) * 128


@pytest.mark.slow
def test_a_compiled_launch_needs_no_more_memory_than_it_says(tmp_path: Path) -> None:
    """Else a device on which it does not fit would be found out by a failing launch."""
    found = json.loads(output_of_compiler(COMPILE, tmp_path))
    for launch, (num_bytes, is_by_matrix_units) in zip(LAUNCHES, found, strict=True):
        assert launch.shared_bytes - 1024 <= num_bytes <= launch.shared_bytes
        assert is_by_matrix_units
