"""Loops inside of loops, as compilers for GPUs understand them.

Triton 3.6 drops what a loop carries from turn to turn if nothing but the bounds of a loop inside
needs it: later turns then have the bounds of the first. Other releases are right, and so is the
interpreter, so the kernels are looked at instead: none may carry such a number.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.kernels.conftest import output_of_compiler

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.gpu.attention.decode_tma import attend_decodes
from loramux.kernels.gpu.attention.kernel import attend_items
from loramux.kernels.gpu.lora import expand, expand_swiglu, shrink
from loramux.kernels.gpu.lora_augmented import tiles

KINDS = (
    "*i32 items work slots_ptr items_ptr page_table_ptr semaphores_ptr",
    "*fp32 cos_ptr sin_ptr partials partial_ptr log_sum_ptr",
    "*bf16 y_ptr out_ptr pool storage_ptr x y out q_ptr",
    "fp32 eps scale softcap",
    "tensordesc<bf16[1,16,64]> tiles",
)
TYPES = {name: kind for kind, *names in map(str.split, KINDS) for name in names}
AUGMENTED = {
    "SIZE": 512, "INNER": 512, "SPLITS": 1, "NUM_QUERIES": 4, "KV_HEADS": 2, "HEAD_DIM": 64,
    "BLOCK_TOKENS": 16, "WARPS": 1, "J": 8, "ACTIVATION": "silu", "EARLY_B": False,
    "PDL": True, "norm_ptr": None,
}
SEGMENTED = {
    "IN": 512, "SLICES": 3, "FP12": False, "ROWS": 2, "ROW_K": 256, "ROW_RANKS": 4,
    "TILE_K": 256, "STEP_K": 128, "STAGES": 2, "TILE_M": 16, "MAX_SPLITS": 2, "ROW_SPLITS": 2,
    "TILE_SPLITS": 2, "ROW_N": 128, "WARPS": 1, "J": 8, "SMALL_ROWS": 8, "SMALL": 0,
    "INNER": 512, "ACTIVATION": "silu", "COMPILED": True, "PDL": True,
}
FP12 = {"FP12": True, "SMALL": 8, "ROW_K": 512, "ROW_RANKS": 16, "TILE_K": 512}
ATTENTION = {
    "KV_HEADS": 2, "GROUP": 4, "HEAD_DIM": 64, "BLOCK_TOKENS": 16, "WINDOW": 0,
    "HAS_SOFTCAP": False, "TWO_PHASES": True, "ROWS": 16, "TILES": 1, "TOKENS": 16, "DIM": 64,
    "REDUCED": 1024, "PRECISION": "tf32", "DTYPE": "bfloat16", "PDL": True,
}
JOBS = [
    *((kernel, {**AUGMENTED, "LOOPS": loops}) for loops in (False, True) for kernel in (
        tiles.rotate_tiles_kernel, tiles.activate_tiles_kernel, tiles.expand_kernel
    )),
    *((kernel, SEGMENTED) for kernel in (
        shrink.shrink_kernel, shrink.shrink_tiles_kernel,
        expand.expand_kernel, expand_swiglu.expand_swiglu_kernel,
    )),
    (shrink.shrink_kernel, {**SEGMENTED, **FP12}),
    *((attend_items, {**ATTENTION, "CAUSAL": is_causal}) for is_causal in (False, True)),
    (attend_decodes, ATTENTION),
]
found = {}
for number, (kernel, shapes) in enumerate(JOBS):
    names = kernel.arg_names
    known = {n: v for n, v in shapes.items() if n in names}
    signature = {n: "constexpr" if n in known else TYPES.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, known)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    found[f"{number} {kernel.__name__}"] = made.asm["ttir"]
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
            behind = "\n".join(body[end + 1 :])
            for number, name in enumerate(names):
                result = _result(line, number)
                is_needed = re.search(re.escape(result) + r"(?![\w.#:])", behind)
                if not is_needed and not _is_needed(name, body[:end], depth):
                    found.append(name)
    return found


def _result(line: str, number: int) -> str:
    """Return what a loop leaves behind in place of a number that it carries."""
    name, _, count = line.partition(" = ")[0].strip().partition(":")
    return f"{name}#{number}" if count else name


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
    # A value that nothing reads is harmless.
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
    later = ir + "    tt.store %p, %0#1 : i32"
    assert carried_for_bounds_alone(later) == ["%first"]
    masked = ir.replace("tt.store %p, %sum", "tt.store %p, %sum, %first")
    assert carried_for_bounds_alone(masked) == ["%count"]


@pytest.mark.slow
def test_no_kernel_carries_bounds(tmp_path: Path) -> None:
    programs = json.loads(output_of_compiler(COMPILE, tmp_path))
    assert len(programs) == 14 and all("scf.for" in ir for ir in programs.values())
    found = {name: carried_for_bounds_alone(ir) for name, ir in programs.items()}
    assert found == dict.fromkeys(programs, [])
