"""Runs `pip install` and says what it does: large parts with their size, a line every few seconds.

Usage: python pip_progress.py ARGUMENTS. pip's own progress bars need a terminal, and without them
it is silent for minutes.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

INTERVAL_S = float(os.environ.get("LORAMUX_PIP_INTERVAL_S", "5"))
# Smaller files are named only if they take long.
LARGE_MB = 5.0
MB_OF = {"kB": 0.001, "MB": 1.0, "GB": 1000.0, "bytes": 1e-6}
DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?(\S+?) \(([\d.]+) (\w+)\)")
CACHED = re.compile(r"\s*Using cached (?:\S*/)?(\S+)")
RECEIVED = re.compile(r"Progress (\d+) of (\d+)")
NUM_LAST = 20


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", bar(), *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pip:
        assert pip.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            for line in pip.stdout or ():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        last: deque[str] = deque(maxlen=NUM_LAST)
        for text in Report(last).follow(lines):
            print(f"    {text}", flush=True)
    if pip.returncode:
        sys.stderr.writelines(last)
    return pip.returncode


def bar() -> str:
    """Return the kind of progress that this pip reports to a program; off: it has none."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    major, minor = (int(part) for part in found.stdout.split()[1].split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


class Report:
    """Turns lines of pip into few lines for a person."""

    def __init__(self, last: deque[str]) -> None:
        self._last = last
        self._doing = "asking which packages are needed"
        self._began_s = time.monotonic()
        self._received = ""

    def follow(self, lines: queue.SimpleQueue[str | None]) -> Iterator[str]:
        """Yield what to print, until pip has closed its output."""
        said_s = time.monotonic()
        while True:
            try:
                line = lines.get(timeout=max(0.0, said_s + INTERVAL_S - time.monotonic()))
            except queue.Empty:
                line = ""
            if line is None:
                return
            text = self._take(line)
            if not text and time.monotonic() - said_s >= INTERVAL_S:
                text = self._still()
            if text:
                said_s = time.monotonic()
                yield text

    def _take(self, line: str) -> str:
        """Take a line, or an empty one; return what to say at once."""
        if received := RECEIVED.match(line):
            done, total = (int(part) / 1e6 for part in received.groups())
            self._received = f", {done:.0f} of {total:.0f} MB"
            return ""
        if line:
            self._last.append(line)
        if found := DOWNLOAD.match(line):
            name, size, unit = found.groups()
            self._begin(f"downloading {part_of(name)} ({size} {unit})")
            is_large = float(size) * MB_OF.get(unit, 1.0) >= LARGE_MB
            return self._doing if is_large else ""
        if found := CACHED.match(line):
            self._begin(f"taking {part_of(found[1])} from pip's cache")
        elif line.startswith("Collecting "):
            self._begin(f"looking for {line.split()[1]}")
        elif line.startswith("Installing collected packages:"):
            self._begin(f"unpacking {line.count(',') + 1} packages")
            return self._doing
        return ""

    def _begin(self, doing: str) -> None:
        self._doing, self._began_s, self._received = doing, time.monotonic(), ""

    def _still(self) -> str:
        return f"{self._doing}{self._received}, {time.monotonic() - self._began_s:.0f} s"


def part_of(file_name: str) -> str:
    """Return package and version of a wheel or archive."""
    name = file_name.removesuffix(".metadata").replace("%2B", "+")
    return "-".join(name.split("-")[:2]) if name.endswith(".whl") else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
