"""Checks grammars in a process of their own: `python -m loramux.engine.grammar.checker`.

A hostile grammar can exhaust the stack, the memory or a core of the process that compiles it. Each
one is checked in a fork with limits: {"grammar": text} as a line in, {"warnings"} or {"error"} out.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

CPU_SECONDS = 0.18
"""Ordinary schemas of 250 KiB take 0.05 s, and those of 300 tools 0.12 s."""
_MEMORY_BYTES = 1 << 30
# Half of what the threads of the engine process have, in which it is compiled afterwards.
_STACK_BYTES = 4 << 20
TOO_LONG = f"it takes more than {1000 * CPU_SECONDS:.0f} ms to compile; make it smaller"
TOO_DEEP = "it is nested too deeply, or needs too much memory; make it smaller"


def main() -> None:
    from loramux.engine.grammar.library import import_library

    import_library()
    # With the default action, the kernel ends a fork inside of a call of the library.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _check(json.loads(line)["grammar"])
        _, status = os.waitpid(pid, 0)
        if status != 0:
            is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            _answer({"error": TOO_LONG if is_slow else TOO_DEEP})


def _check(text: str) -> None:
    """Write the answer and end the process."""
    from loramux.engine.grammar.library import check_grammar, compile_for_bytes
    from loramux.types.grammar import Grammar

    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_DATA, _MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        grammar = Grammar.decode(text)
        warnings = check_grammar(grammar)
        compile_for_bytes(grammar)
    except ValueError as error:
        found: dict[str, Any] = {"error": str(error)}
    else:
        found = {"warnings": warnings}
    signal.setitimer(signal.ITIMER_PROF, 0)
    _answer(found)
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, hard))


def _answer(found: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
