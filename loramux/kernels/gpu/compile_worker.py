"""Child process that compiles Triton kernels into Triton's disk cache; it does not use the GPU.

    python -m loramux.kernels.gpu.compile_worker NUM_PROCESSES

Reads one JSON job per line from its input, see `KernelJob`, and writes one line per finished job:
the job's number and its error, or null. It ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from loramux.kernels.gpu.cache_keys import compute_cache_keys

Target = tuple[str, int, int]
"""Backend, architecture and warp size."""


class KernelJob(msgspec.Struct, frozen=True):
    """One kernel variant: a jit function with its specialization, as Triton serializes it."""

    number: int
    module: str
    function: str
    specialization: str
    target: Target


class KernelDone(msgspec.Struct, frozen=True):
    number: int
    error: str | None = None


def compile_kernel(job: KernelJob) -> KernelDone:
    """Compile a kernel into the disk cache, and return its error as a text."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    try:
        function = getattr(importlib.import_module(job.module), job.function)
        data = json.loads(job.specialization)
        source = ASTSource(
            function,
            {name: _as_tuple(kind) for name, kind in data["signature"].items()},
            dict(zip(map(tuple, data["constant_keys"]), _constants(data), strict=True)),
            dict(zip(map(tuple, data["attrs_keys"]), data["attrs_vals"], strict=True)),
        )
        options = {name: _as_tuple(value) for name, value in data["options"].items()}
        kernel = compile(source, target=GPUTarget(*job.target), options=options)
        _build_launcher(source, kernel)
    except Exception as error:  # the caller compiles the kernel itself, and gets the error there
        return KernelDone(job.number, repr(error))
    return KernelDone(job.number)


def _build_launcher(source: Any, kernel: Any) -> None:
    """Build the host code that launches the kernel, which Triton caches as well.

    It needs the GPU's driver; without it the first launch builds the code.
    """
    from triton.runtime import driver

    with contextlib.suppress(Exception):
        driver.active.launcher_cls(source, kernel.metadata)


def _constants(data: dict[str, Any]) -> Iterator[object]:
    import triton.language as tl

    for value in data["constant_vals"]:
        if isinstance(value, str) and tl.dtype.is_dtype(value):
            yield tl.dtype(value)
        elif isinstance(value, dict) and "constexpr" in value:
            yield tl.constexpr(value["constexpr"])
        else:
            yield value


def _as_tuple(value: object) -> object:
    """Convert lists back to tuples: JSON has no tuples, and kernels take no lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _read_jobs(lines: TextIO) -> Iterator[KernelJob]:
    decoder = msgspec.json.Decoder(KernelJob)
    for line in lines:
        yield decoder.decode(line)


def main(num_processes: int) -> None:
    # Forked processes share the modules and the keys.
    compute_cache_keys()
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        for done in pool.imap_unordered(compile_kernel, _read_jobs(sys.stdin)):
            sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
