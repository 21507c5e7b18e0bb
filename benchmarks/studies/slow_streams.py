"""Hold a thousand open streams whose clients read slowly or not at all, and measure memory.

    python -m benchmarks.studies.slow_streams [--streams 1000] [--tokens 192]

A tiny random model is served, because the server is what is measured. Half of the clients read a
few bytes now and then, the others nothing, until the engine has computed every token and the
streams were held for a while. Then all read to the end and must get their whole answer. The second
round shows what memory the first one leaves allocated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.raw_stream import Answer, RawStream
from benchmarks.lib.report import parse_arguments, write_table
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

NUM_PROMPTS = 16
RECEIVE_BUFFER = 4096
"""Close to the kernel's minimum, so that unread data queues in the server."""
SLOW_READ_BYTES = 512
SLOW_READ_PAUSE_S = 1.0
SETTLE_S = 2.0
POLL_S = 0.25
IDLE_POLLS = 4
ROUND_LIMIT_S = 120.0


@dataclass(frozen=True)
class Memory:
    """MiB of resident memory of both processes, and of the kernel's socket buffers."""

    server: float
    engine: float
    kernel: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    before: Memory
    peak: Memory
    held: Memory
    after: Memory
    slowest_health_s: float
    computing_s: float
    num_bytes: int
    answers: list[Answer]
    expected: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--hold", type=float, default=5.0, help="seconds to hold the streams after the last token"
    )
    args = parse_arguments(parser)
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model_with_tokenizer(folder / "model", max_position_embeddings=2048)
        flags = ["--model", str(folder / "model"), "--served-model-name", "tiny"]
        flags += ["--dtype", "float32", "--device-memory", "256MiB"]
        with running_server(folder / "log", *flags) as server:
            outcomes = [run_round(server, args) for _ in range(args.rounds)]
    table = summarize(outcomes)
    machine = {**describe_machine("float32"), "load at start": load}
    write_table("slow-streams", table, machine, args)
    if wrong := sum(map(count_wrong, outcomes)):
        raise SystemExit(f"{wrong} streams did not get their whole answer")


def run_round(server: RunningServer, args: argparse.Namespace) -> Outcome:
    trial = Trial(server, args.streams, args.tokens)
    return asyncio.run(asyncio.wait_for(trial.run(args.hold), ROUND_LIMIT_S))


class Trial:
    """One round: opens all streams, holds them, reads them, and records memory."""

    def __init__(self, server: RunningServer, num_streams: int, num_tokens: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        source = random.Random(0)
        self._prompts = [[source.randrange(3, 256) for _ in range(16)] for _ in range(NUM_PROMPTS)]
        self._streams = [
            self._stream(index, receive_buffer=RECEIVE_BUFFER) for index in range(num_streams)
        ]
        self._peak = Memory(0, 0, 0)
        self._slowest_health_s = 0.0

    async def run(self, hold_s: float) -> Outcome:
        expected = await self._expected()
        before = self._memory()
        start = time.monotonic()
        await asyncio.gather(*(stream.send() for stream in self._streams))
        slow_readers = [asyncio.create_task(read_slowly(stream)) for stream in self._streams[::2]]
        await self._until_computed()
        computing_s = time.monotonic() - start
        await asyncio.sleep(hold_s)
        held = self._memory()
        for reader in slow_readers:
            reader.cancel()
        await asyncio.gather(*slow_readers, return_exceptions=True)
        await asyncio.gather(*(stream.read_all() for stream in self._streams))
        self._memory()
        for stream in self._streams:
            stream.close()
        await asyncio.sleep(SETTLE_S)
        return Outcome(
            before=before,
            peak=self._peak,
            held=held,
            after=self._memory(),
            slowest_health_s=self._slowest_health_s,
            computing_s=computing_s,
            num_bytes=sum(stream.num_bytes for stream in self._streams),
            answers=[stream.answer() for stream in self._streams],
            expected=[expected[index % NUM_PROMPTS] for index in range(len(self._streams))],
        )

    async def _expected(self) -> list[str]:
        """Return the texts that a fast client gets, which also warms the server up."""
        streams = [self._stream(index) for index in range(NUM_PROMPTS)]
        await asyncio.gather(*(stream.send() for stream in streams))
        await asyncio.gather(*(stream.read_all() for stream in streams))
        answers = [stream.answer() for stream in streams]
        assert all(answer.is_whole for answer in answers), answers
        return [answer.text for answer in answers]

    async def _until_computed(self) -> None:
        """Wait until the engine is idle, sampling memory and the latency of /health."""
        num_idle, was_busy = 0, False
        async with httpx2.AsyncClient(base_url=self._server.url, timeout=60) as client:
            while not was_busy or num_idle < IDLE_POLLS:
                began = time.monotonic()
                health = (await client.get("/health")).raise_for_status().json()
                self._slowest_health_s = max(self._slowest_health_s, time.monotonic() - began)
                is_busy = bool(health["running"] or health["waiting"])
                was_busy = was_busy or is_busy
                num_idle = 0 if is_busy else num_idle + 1
                self._memory()
                await asyncio.sleep(POLL_S)

    def _stream(self, index: int, *, receive_buffer: int | None = None) -> RawStream:
        body: dict[str, Any] = {
            "prompt": self._prompts[index % NUM_PROMPTS],
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return RawStream(self._server.url, body, receive_buffer=receive_buffer)

    def _memory(self) -> Memory:
        (engine_pid,) = self._server.engine_pids
        now = Memory(resident_mib(self._server.process.pid), resident_mib(engine_pid), socket_mib())
        self._peak = Memory(
            max(self._peak.server, now.server),
            max(self._peak.engine, now.engine),
            max(self._peak.kernel, now.kernel),
        )
        return now


async def read_slowly(stream: RawStream) -> None:
    while await stream.read(SLOW_READ_BYTES):
        await asyncio.sleep(SLOW_READ_PAUSE_S)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def socket_mib() -> float:
    """Return the MiB of TCP buffers of the whole machine."""
    line = next(
        line
        for line in Path("/proc/net/sockstat").read_text().splitlines()
        if line.startswith("TCP:")
    )
    num_pages = int(line.rpartition("mem ")[2])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_wrong(outcome: Outcome) -> int:
    """Count the streams without finish_reason and [DONE], with an error, or with a wrong text."""
    return sum(
        not answer.is_whole or answer.text != text
        for answer, text in zip(outcome.answers, outcome.expected, strict=True)
    )


def summarize(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """Make a row for each figure with a column for each round."""
    columns = [figures(outcome) for outcome in outcomes]
    return [
        {
            "figure": name,
            **{f"round {number}": column[name] for number, column in enumerate(columns, 1)},
        }
        for name in columns[0]
    ]


def figures(outcome: Outcome) -> dict[str, object]:
    num_streams = len(outcome.answers)
    found: dict[str, object] = {
        "open streams": num_streams,
        "ended with finish_reason and [DONE]": sum(a.is_whole for a in outcome.answers),
        "ended with an error": sum(a.error is not None for a in outcome.answers),
        "with the expected text": num_streams - count_wrong(outcome),
        "MB received": round(outcome.num_bytes / 1e6, 1),
        "seconds until all was computed": round(outcome.computing_s, 1),
        "slowest /health meanwhile, s": round(outcome.slowest_health_s, 2),
    }
    for process in ("server", "engine", "kernel"):
        where = "TCP buffers of the kernel" if process == "kernel" else f"{process} RSS"
        for moment in ("before", "peak", "held", "after"):
            found[f"{where}, {moment}, MiB"] = round(getattr(getattr(outcome, moment), process))
    return found


if __name__ == "__main__":
    main()
