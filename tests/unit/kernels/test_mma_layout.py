from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from tests.unit.kernels.conftest import DEVICE, output_of_compiler  # noqa: E402

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.gpu.lora_augmented.tiles import expand_kernel

types = {"y_ptr": "*bf16", "out_ptr": "*bf16", "pool": "*bf16", "items": "*i32", "work": "*i32"}
constants = {"SIZE": 4096, "WARPS": 2, "J": 8, "SPLITS": 1, "EARLY_B": False, "PDL": True}
for loops in (False, True):
    known = {**constants, "LOOPS": loops}
    names = expand_kernel.arg_names
    signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in known}
    source = ASTSource(expand_kernel, signature, known, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    print(made.metadata.shared, "bar.sync" in made.asm["ptx"], "mma.sync" in made.asm["ptx"])
"""


IS_TUNED_FOR = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE is not None, reason="compiles for Hopper, whatever GPU there is")
def test_kernels_for_tiles_compile_to_tensor_core_code(tmp_path: Path) -> None:
    """With Triton 3.6 nothing goes through shared memory; newer releases differ."""
    lines = [line.split() for line in output_of_compiler(COMPILE, tmp_path).splitlines()]
    assert len(lines) == 2 and all(line[2] == "True" for line in lines)
    if IS_TUNED_FOR:
        assert all(line[:2] == ["0", "False"] for line in lines)
