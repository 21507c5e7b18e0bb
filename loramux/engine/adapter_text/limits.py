"""Limits of a process that interprets the files of an adapter."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

MIB = 2**20
MAX_PROMPT_TOKENS = 2**20
"""Token ids that a template or a text may make."""
MAX_RENDERED_CHARACTERS = 2**24
MAX_ADDED_TOKENS = 2**14
MAX_TOKEN_CHARACTERS = 256
MAX_SETTINGS = 2**10
"""Fields of a tokenizer_config.json; the library makes each an attribute."""
MAX_TEMPLATE_CHARACTERS = 2**18
"""Characters of all chat templates of an adapter together."""
MAX_FRAME_BYTES = 8 * MIB
"""Size of an answer of the process."""
TIMES_BASE = 4
"""A tokenizer.json may be so many times larger than that of the base, and 4 MiB more."""
OUT_OF_MEMORY = 3
"""Exit status of a process that was refused memory."""
# Inference has precedence where it needs all cores.
_NICENESS = 5


def start_seconds(num_bytes: int) -> float:
    """CPU time to read and parse files of this size: that of 150,000 tokens takes 2 s of 13."""
    return 2.0 + 1e-6 * num_bytes


def call_seconds(num_bytes: int) -> float:
    """CPU time to render and encode a request of this size; a usual one takes milliseconds."""
    return 1.0 + 4e-6 * num_bytes


def wall_seconds(cpu_seconds: float) -> float:
    """Time until a process is killed that waits for cores or for a disk."""
    return 20.0 + 5.0 * cpu_seconds


def start_memory(num_bytes: int) -> int:
    return 256 * MIB + 24 * num_bytes


def call_memory(num_bytes: int) -> int:
    return 128 * MIB + 128 * min(num_bytes, 4 * MIB)


def isolate() -> None:
    """Limits the calling process before it sees a file of an adapter."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # With the default action, the kernel ends the process inside of a call of a library.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit(resource.RLIMIT_CORE, 0)


def seal() -> None:
    """Take the right to open files and sockets, and to write."""
    limit(resource.RLIMIT_FSIZE, 0, is_final=True)
    limit(resource.RLIMIT_NOFILE, 0, is_final=True)


class Budget:
    """What the process may compute and use until it has answered a message."""

    def __init__(self) -> None:
        self._used = _address_space()

    def settle(self) -> None:
        """Count the memory that the process has now as its own, whatever comes later."""
        self._used = _address_space()

    def grant(self, cpu_seconds: float, num_bytes: int) -> None:
        """Lets the process compute for so long, and grow by so many bytes."""
        if self._used:
            limit(resource.RLIMIT_AS, self._used + num_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)

    def stop(self) -> None:
        """Stop the clock."""
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit(kind: int, value: int, *, is_final: bool = False) -> None:
    _, hard = resource.getrlimit(kind)
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, lowest if is_final else hard))


def _address_space() -> int:
    """Return the size of the process; 0 on systems that do not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()
