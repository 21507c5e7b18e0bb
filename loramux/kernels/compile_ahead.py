"""Compiles the numba kernels in a child process, while the engine computes without them.

It takes 20 to 60 s on two cores, once: numba caches the code on disk, and a record beside the cache
says that all of it is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pkgutil
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loramux.base.process_environment import child_environment

_log = logging.getLogger(__name__)
_PACKAGE = "loramux.kernels.cpu_jit"
_SOURCES = Path(__file__).parent / "cpu_jit"
# A quarter of a core beside an engine that is busy all the time.
_NICENESS = 5
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def are_compiled() -> bool:
    """Whether the cache has all kernels; without importing numba, which takes a second."""
    with contextlib.suppress(OSError, ValueError):
        files = json.loads(_record().read_text())
        return bool(files) and all(os.path.exists(file) for file in files)
    return False


def compile_all() -> None:
    """Compile the kernels, or read them from the cache, and record what the cache has."""
    modules = [
        importlib.import_module(f"{_PACKAGE}.{module.name}")
        for module in pkgutil.iter_modules([str(_SOURCES)])
    ]
    found = (value for module in modules for value in vars(module).values())
    caches = (getattr(value, "_cache", None) for value in found)
    folders = {path for cache in caches if (path := getattr(cache, "cache_path", None))}
    files = [str(file) for folder in folders for file in Path(folder).glob("*.nb[ci]")]
    with contextlib.suppress(OSError):  # Nothing is cached where nothing can be written.
        _record().parent.mkdir(parents=True, exist_ok=True)
        partial = _record().with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(sorted(files)))
        partial.replace(_record())


class CompileAhead:
    """The kernels of one engine process: compiled by a child, then imported on a thread here."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.is_done = False
        """Whether importing the kernels takes no time any more."""
        self.began_s = 0.0

    def start(self, on_done: Callable[[], None]) -> None:
        """Begin; `on_done` is called on another thread, and never after a failure."""
        self.began_s = time.monotonic()
        threading.Thread(
            target=self._work, args=(on_done,), daemon=True, name="compile ahead"
        ).start()

    def close(self) -> None:
        self._is_closed = True
        if self._child is not None:
            self._child.kill()

    def _work(self, on_done: Callable[[], None]) -> None:
        try:
            self._run_child()
            if self._is_closed:
                return
            # Reads the cache. Where nothing could be cached, it compiles here, which slows steps.
            compile_all()
        except Exception:  # The engine serves without them.
            _log.exception("the CPU kernels cannot be compiled; torch's are used")
            return
        self.is_done = True
        on_done()

    def _run_child(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=child_environment(),
        ) as self._child:
            status = self._child.wait()
        if status and not self._is_closed:
            _log.warning("the process that compiles the CPU kernels ended with status %d", status)


def main() -> None:
    """Compile in a process of its own, which ends with the one that started it."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with _alone():
        compile_all()
    # Not through the interpreter's shutdown, which waits for the thread above.
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Compile in one process at a time: numba's cache loses entries of two that write at once."""
    lock = _record().with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record() -> Path:
    """Return the file that lists the cache of these sources, by these compilers, for this CPU."""
    return _record_folder() / f"kernels-{_key()}.json"


def _record_folder() -> Path:
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(own)
    if os.access(_SOURCES, os.W_OK):
        return _SOURCES / "__pycache__"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "loramux"


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    digest.update(" ".join((*versions, sys.version, platform.machine(), _cpu())).encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "".join(line for line in lines if line.startswith(_CPU_LINES))
    return platform.processor()


if __name__ == "__main__":
    main()
