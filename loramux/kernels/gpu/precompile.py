"""Compiles Triton kernels in parallel processes before their first launch.

A dry run of the model's steps inside `collecting_kernels` reports every kernel variant that the
steps launch. Child processes compile the variants into Triton's disk cache, and the first real
launch reads them from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton.runtime import driver

from loramux.base.process_environment import child_environment
from loramux.kernels.gpu.compile_worker import KernelDone, KernelJob, Target

_log = logging.getLogger(__name__)
_MAX_PROCESSES = 16
_WORKER = "loramux.kernels.gpu.compile_worker"
OnKernel = Callable[[str, str, str], None]
"""Receives module, function and serialized specialization of a kernel variant."""


@contextlib.contextmanager
def collecting_kernels(on_kernel: OnKernel) -> Iterator[None]:
    """Report the kernels that are not compiled yet instead of compiling and launching them."""

    def hook(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        on_kernel(fn.module, fn.name, compile["specialization_data"])
        # Triton then neither compiles nor launches the kernel.
        return True

    runtime: Any = triton.knobs.runtime
    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        runtime.jit_cache_hook = before


def current_target() -> Target:
    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


class KernelCompiler:
    """Compiles kernels in child processes; start it early, because they import torch first."""

    def __init__(self, num_processes: int | None = None) -> None:
        count = num_processes or min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        self._keys: set[tuple[str, str, str]] = set()
        self._target: Target | None = None
        self._num_done = 0
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._is_ended = False
        self._receiver = threading.Thread(target=self._receive, daemon=True, name="compiled")
        self._receiver.start()

    @property
    def num_kernels(self) -> int:
        return len(self._keys)

    @property
    def num_done(self) -> int:
        return self._num_done

    def submit(self, module: str, function: str, specialization: str) -> None:
        """Compile a kernel variant in the background; a variant is compiled once."""
        key = (module, function, specialization)
        if key in self._keys:
            return
        self._keys.add(key)
        if self._target is None:
            self._target = current_target()
        job = KernelJob(
            number=len(self._keys),
            module=module,
            function=function,
            specialization=specialization,
            target=self._target,
        )
        assert self._process.stdin is not None
        # A child that has died is reported by `wait`.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()

    def wait(self, progress: Callable[[float], None] | None = None) -> list[str]:
        """Wait until all kernels are compiled; return the errors of those that are not."""
        with self._changed:
            while self._num_done < len(self._keys) and not self._is_ended:
                self._changed.wait(timeout=0.2)
                if progress is not None:
                    progress(self._num_done / len(self._keys))
            missing = len(self._keys) - self._num_done
        return [*self._errors, *(["the compiler process ended"] if missing else [])]

    def close(self) -> None:
        """End the child process; kernels that are not compiled yet are dropped."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if self._num_done < len(self._keys):
            process.kill()
        process.wait()
        self._receiver.join()
        process.stdout.close()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(KernelDone)
        for line in self._process.stdout:
            done = decoder.decode(line)
            with self._changed:
                self._num_done += 1
                if done.error is not None:
                    self._errors.append(done.error)
                self._changed.notify_all()
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()


class CompiledStamp:
    """Records in Triton's cache folder that all kernels of a configuration are compiled."""

    def __init__(self, configuration: str) -> None:
        """Take what the kernel variants depend on besides their source, as `configuration`."""
        digest = hashlib.sha256(triton.__version__.encode())
        folder = Path(__file__).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
        digest.update(configuration.encode())
        folder = Path(triton.knobs.cache.dir)
        self._path = folder / "loramux" / digest.hexdigest()

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(f"{time.time():.0f}\n")
        except OSError as error:
            _log.warning("cannot write %s: %s; kernels are checked again", self._path, error)
