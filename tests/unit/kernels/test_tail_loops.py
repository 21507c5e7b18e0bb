"""Loops inside of loops, as compilers for GPUs understand them.

Triton 3.6 drops what a loop carries from turn to turn if nothing but the bounds of a loop inside
needs it: later turns then have the bounds of the first. Other releases are right, and so is the
interpreter, so the kernels are looked at instead: none may carry such a number.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.tail_rotate_triton import rotate_tiles_kernel
from loramux.kernels.tail_tile_triton import activate_tiles_kernel, expand_kernel

number = "*i32 records work slots_ptr"
real = "*fp32 cos_ptr sin_ptr"
value = "*bf16 y_ptr out_ptr pool storage_ptr"
TYPES = {name: kind for kind, *names in map(str.split, (number, real, value)) for name in names}
TYPES["eps"] = "fp32"
SHAPES = {
    "SIZE": 512, "INNER": 512, "PARTS": 1, "NUM_QUERIES": 4, "KV_HEADS": 2, "HEAD_DIM": 64,
    "BLOCK_TOKENS": 16, "WARPS": 1, "J": 8, "ACTIVATION": "silu", "EARLY_B": False,
    "OVERLAP": True, "norm_ptr": None,
}
found = []
for kernel in (rotate_tiles_kernel, activate_tiles_kernel, expand_kernel):
    for loops in (False, True):
        names = kernel.arg_names
        known = {n: v for n, v in {**SHAPES, "LOOPS": loops}.items() if n in names}
        signature = {n: "constexpr" if n in known else TYPES.get(n, "i32") for n in names}
        source = ASTSource(kernel, signature, known)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
        found.append(made.asm["ttir"])
print(json.dumps(found))
"""


def carried_for_bounds_alone(ir: str) -> list[str]:
    """Numbers that a loop carries, and that reach nothing but bounds of other loops."""
    lines = [line.split(" loc(")[0] for line in ir.splitlines()]
    found = []
    for place, line in enumerate(lines):
        if "scf.for" in line and "iter_args(" in line:
            depth = len(line) - len(line.lstrip())
            body = lines[place + 1 :]
            end = next(i for i, other in enumerate(body) if other.startswith(" " * depth + "}"))
            names = re.findall(r"(%[\w.#]+) = ", line.split("iter_args(")[1].split(")")[0])
            found += [name for name in names if not _is_needed(name, body[:end], depth)]
    return found


def _is_needed(name: str, body: list[str], depth: int) -> bool:
    uses = re.compile(re.escape(name) + r"(?![\w.#])")
    is_used = False
    for line in body:
        target, _, rest = line.strip().partition(" = ")
        text = rest or target
        if "scf.for" in text:
            # What another loop carries may be needed there; its bounds are not looked at.
            text = text.partition("iter_args")[2]
        if not uses.search(text):
            is_used |= bool(uses.search(rest or line))
            continue
        is_used = True
        is_own_yield = "scf.yield" in line and len(line) - len(line.lstrip()) == depth + 2
        if is_own_yield:
            continue
        is_pure = text.startswith("arith.")
        if not is_pure or _is_needed(target, body, depth):
            return True
    # One that nobody reads costs nothing and harms nobody.
    return not is_used


def test_what_is_looked_for_is_found() -> None:
    ir = """
    %0:2 = scf.for %i = %a to %b step %c iter_args(%first = %x, %count = %y) -> (i32, i32) {
      %end = arith.addi %first, %count : i32 loc(#loc)
      %sum = scf.for %j = %first to %end step %c iter_args(%s = %zero) -> (f32) {
        %t = arith.addf %s, %one : f32
        tt.store %q, %t : f32
        scf.yield %t : f32
      }
      tt.store %p, %sum : f32
      scf.yield %n, %m : i32, i32
    }
"""
    assert carried_for_bounds_alone(ir) == ["%first", "%count"]
    masked = ir.replace("tt.store %p, %sum", "tt.store %p, %sum, %first")
    assert carried_for_bounds_alone(masked) == ["%count"]


def test_no_tail_kernel_carries_bounds(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    )
    programs = json.loads(result.stdout)
    assert len(programs) == 6 and all("iter_args(" in ir for ir in programs)
    assert [carried_for_bounds_alone(ir) for ir in programs] == [[]] * 6
