"""Checks grammars of requests outside of this process, and remembers the results."""

from __future__ import annotations

import atexit
import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import cache
from queue import LifoQueue

from loramux.base.process_environment import child_environment
from loramux.engine.grammar.library import import_library
from loramux.types.grammar import Grammar

_NUM_PROCESSES = 2
_MAX_KNOWN = 1024


class CheckFailed(Exception):
    """The checking process ended."""


class GrammarChecker:
    """Two processes that check grammars, started when they are needed."""

    def __init__(self) -> None:
        self._idle: LifoQueue[_Process | None] = LifoQueue()
        for _ in range(_NUM_PROCESSES):
            self._idle.put(None)
        self._known: OrderedDict[bytes, tuple[str | None, tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> tuple[str, ...]:
        """Return warnings; raises ValueError, with the reason, for what cannot be enforced."""
        text = grammar.encode()
        key = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = self._ask(text)
            with self._lock:
                self._known[key] = found
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        error, warnings = found
        if error is not None:
            raise ValueError(error)
        return warnings

    def close(self) -> None:
        for _ in range(_NUM_PROCESSES):
            process = self._idle.get()
            if process is not None:
                process.close()
            self._idle.put(None)

    def _ask(self, text: str) -> tuple[str | None, tuple[str, ...]]:
        process = self._idle.get()
        try:
            if process is None or not process.is_alive:
                process = _Process()
            return process.check(text)
        except BaseException:
            if process is not None:
                process.close()
            process = None
            raise
        finally:
            self._idle.put(process)


class _Process:
    def __init__(self) -> None:
        import_library()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "loramux.engine.grammar.checker"],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # ctrl-c in a terminal is for the server, which finishes its requests.
            process_group=0,
        )

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def check(self, text: str) -> tuple[str | None, tuple[str, ...]]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(json.dumps({"grammar": text}).encode() + b"\n")
        self._popen.stdin.flush()
        line = self._popen.stdout.readline()
        if not line:
            raise CheckFailed("The process that checks grammars ended.")
        found = json.loads(line)
        return found.get("error"), tuple(found.get("warnings", ()))

    def close(self) -> None:
        """End the process, which has no state."""
        self._popen.kill()
        with self._popen:
            pass


@cache
def _checker() -> GrammarChecker:
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


def check_apart(grammar: Grammar) -> tuple[str, ...]:
    """Check a grammar in a process with limits of time, memory and stack.

    Returns warnings; raises ValueError, with the reason, for what cannot be enforced. It may take
    a moment: not for an event loop.
    """
    return _checker().check(grammar)
