"""`loramux serve` as a user starts it, with the seconds of each phase of its start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LISTENING = re.compile(r"listening on (http://[\d.]+:\d+)", re.IGNORECASE)
PHASE_END = " …"
BEFORE = "Python and command line"
AFTER = "first token"
STOP_LIMIT_S = 60.0
NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the server's output, and the seconds from its start until it was printed."""

    after_s: float
    text: str


@dataclass(slots=True)
class Output:
    """The lines that a server has printed so far."""

    began_s: float
    lines: list[Line] = field(default_factory=list)
    url: str | None = None

    def read(self, stream: Iterator[str]) -> None:
        for text in stream:
            self.lines.append(Line(time.perf_counter() - self.began_s, text.rstrip()))
            if self.url is None and (found := LISTENING.search(text)) is not None:
                self.url = found[1]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


@dataclass(frozen=True, slots=True)
class StartedServer:
    url: str
    phases: dict[str, float]
    """Seconds by phase in the order of the start; the last is the first token's."""
    banner: tuple[str, ...]

    @property
    def first_answer_s(self) -> float:
        """Seconds from the command until the answer to the first request."""
        return sum(self.phases.values())


@contextmanager
def started_server(
    flags: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] = NO_VARIABLES,
    limit_s: float = 600.0,
) -> Iterator[StartedServer]:
    """Run `loramux serve` on a free port until the context ends; `folder` is its user's data."""
    command = [sys.executable, "-m", "loramux.cli.main", "serve", "--port", "0", *flags]
    variables = {
        **os.environ,
        "XDG_DATA_HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        **environment,
    }
    output = Output(time.perf_counter())
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )
    assert process.stdout is not None
    reader = threading.Thread(target=output.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        url = _wait_for_url(process, output, limit_s)
        listening_s = next(line.after_s for line in output.lines if LISTENING.search(line.text))
        ask_first_token(url, limit_s)
        answered_s = time.perf_counter() - output.began_s
        phases = phase_seconds(output.lines, listening_s)
        yield StartedServer(url, {**phases, AFTER: answered_s - listening_s}, banner(output.lines))
    finally:
        _stop(process)
        reader.join()
        process.stdout.close()


def phase_seconds(lines: Sequence[Line], listening_s: float) -> dict[str, float]:
    """Return the duration of each phase: from its line until the next phase's, the last until
    listening.

    Lines of one phase for many items ("Checking adapter sql …") are added up.
    """
    starts = [(BEFORE, 0.0)]
    for line in lines:
        if line.text.endswith(PHASE_END) and line.after_s <= listening_s:
            starts.append((phase_name(line.text), line.after_s))
    ends = [start for _, start in starts[1:]] + [listening_s]
    seconds: dict[str, float] = {}
    for (name, start), end in zip(starts, ends, strict=True):
        seconds[name] = seconds.get(name, 0.0) + end - start
    return seconds


def phase_name(text: str) -> str:
    name = text.removesuffix(PHASE_END).strip()
    return re.sub(r"^(Checking adapter) .*", r"\1s", name)


def banner(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return what the server prints about its settings, without phases, logs and lists
    of adapters.
    """
    shown = []
    for line in lines:
        if LISTENING.search(line.text):
            break
        is_log = line.text.startswith(("INFO:", "WARNING:"))
        if line.text and not is_log and not line.text.endswith(PHASE_END):
            shown.append(line.text)
    return tuple(text for text in shown if not text.startswith("Adapter "))


def ask_first_token(url: str, limit_s: float) -> None:
    """Send the first request, without a name and with one token of output."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=limit_s) as found:
        model = json.load(found)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": [300, 301, 302], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=limit_s) as found:
        assert json.load(found)["usage"]["completion_tokens"] == 1


def _wait_for_url(process: subprocess.Popen[str], output: Output, limit_s: float) -> str:
    while time.perf_counter() - output.began_s < limit_s:
        if output.url is not None:
            return output.url
        if (status := process.poll()) is not None:
            raise RuntimeError(f"the server ended with status {status}:\n{output.text}")
        time.sleep(0.01)
    raise RuntimeError(f"the server did not start within {limit_s:g} s:\n{output.text}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
