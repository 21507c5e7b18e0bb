"""Measure the router with real processes and replicas that sleep for their steps.

loramux bench router

Policies: Zipf traffic and a flash crowd over four replicas. Overhead: unary requests and streams
through the router against straight to a replica, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from statistics import median

import aiohttp
import httpx2

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.policy_router import POLICIES
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from tests.s3_server import free_ports

REPLICAS, ADAPTERS, DEVICE, HOST, SLOTS, STEP_S = 4, 200, 32, 80, 4, 0.02
ANSWER_TOKENS = 8
CROWD = 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each policy")
    parser.add_argument("--rate", type=float, default=70.0, help="requests a second")
    parser.add_argument(
        "--policies", type=names(POLICIES), default=list(POLICIES), help=", ".join(POLICIES)
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the overhead")
    arguments = parse_arguments(parser)
    out = start_report("router", arguments, describe_machine("none"))
    rows: Table = []
    for policy in arguments.policies:
        with fake_fleet(REPLICAS, SLOTS, STEP_S) as urls, router(policy, urls) as url:
            for trace in ("zipf", "flash"):
                load = Load(
                    url, arguments.rate, arguments.seconds, crowd=CROWD * (trace == "flash")
                )
                asyncio.run(load.run())
                rows.append({"policy": policy, "trace": trace} | load.row())
    out.add(Section(title="Policies, four replicas, 200 adapters", rows=rows, name="policies"))
    with fake_fleet(1, 64, 0.002) as urls, router("seconds", urls) as url:
        rows = asyncio.run(overhead(urls[0], url, arguments.rounds))
    out.add(Section(title="Overhead", rows=rows, name="overhead"))
    out.finish()


@contextmanager
def fake_fleet(count: int, slots: int, step_s: float) -> Iterator[list[str]]:
    with ExitStack() as stack:
        ports = free_ports(count)
        for port in ports:
            sizes = map(str, (port, DEVICE, HOST, slots, step_s))
            stack.enter_context(process("benchmarks.lib.fake_replica", *sizes))
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextmanager
def router(policy: str, urls: list[str]) -> Iterator[str]:
    (port,) = free_ports(1)
    with process("benchmarks.lib.policy_router", policy, str(port), *urls):
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                told = httpx2.get(f"{url}/health", timeout=5).json()
                if told["ready"] == len(urls):
                    break
            except (httpx2.HTTPError, KeyError):
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("the router has no ready replicas")
            time.sleep(0.1)
        yield url


@contextmanager
def process(module: str, *arguments: str) -> Iterator[None]:
    running = subprocess.Popen([sys.executable, "-m", module, *arguments])
    try:
        yield
    finally:
        running.terminate()
        running.wait()


class Load:
    """Requests in an open loop; the first quarter warms up."""

    def __init__(self, url: str, rate: float, seconds: float, *, crowd: float) -> None:
        self._url, self._rate, self._seconds, self._crowd = url, rate, seconds, crowd
        self._found: Counter[str] = Counter()
        self._first_s: list[float] = []

    async def run(self) -> None:
        rng, began, tasks = random.Random(1), time.perf_counter(), set()
        weights = list(accumulate(1 / (rank + 1) for rank in range(ADAPTERS)))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            due = 0.0
            while due < self._seconds:
                due += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
                (adapter,) = rng.choices(range(ADAPTERS), cum_weights=weights)
                in_crowd = 0.4 < due / self._seconds < 0.8 and rng.random() < self._crowd
                name = f"a{ADAPTERS // 2 if in_crowd else adapter}"
                is_counted = due > self._seconds / 4
                tasks.add(asyncio.create_task(self._ask(session, name, is_counted)))
            await asyncio.gather(*tasks)

    async def _ask(self, session: aiohttp.ClientSession, name: str, is_counted: bool) -> None:
        body = {"model": name, "max_tokens": ANSWER_TOKENS, "stream": True}
        began = time.perf_counter()
        async with session.post(f"{self._url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readany()
            seconds = time.perf_counter() - began
            await answer.read()
        if is_counted:
            self._first_s.append(seconds)
            self._found[answer.headers["x-loramux-tier"]] += 1

    def row(self) -> dict[str, object]:
        times, total = sorted(self._first_s), sum(self._found.values())
        return {
            "requests": total,
            "device": round(self._found["device"] / total, 3),
            "disk": round(self._found["disk"] / total, 3),
            "p50 ms": round(median(times) * 1e3, 1),
            "p99 ms": round(times[int(len(times) * 0.99)] * 1e3, 1),
        }


async def overhead(straight: str, routed: str, rounds: int) -> Table:
    unary: dict[str, list[float]] = {"straight": [], "router": []}
    tokens: dict[str, list[float]] = {"straight": [], "router": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(rounds):
            for way, url in (("straight", straight), ("router", routed)):
                unary[way] += [await one(session, url) for _ in range(200)]
                began = time.perf_counter()
                counts = await asyncio.gather(*(stream(session, url) for _ in range(16)))
                tokens[way].append(sum(counts) / (time.perf_counter() - began))
    return [
        {
            "way": way,
            "unary p50 ms": round(median(unary[way]) * 1e3, 2),
            "unary p99 ms": round(sorted(unary[way])[int(len(unary[way]) * 0.99)] * 1e3, 2),
            "tokens/s (16 streams of 2 ms)": round(median(tokens[way])),
        }
        for way in unary
    ]


async def one(session: aiohttp.ClientSession, url: str) -> float:
    began = time.perf_counter()
    body = {"model": "a0", "max_tokens": 0}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
    return time.perf_counter() - began


async def stream(session: aiohttp.ClientSession, url: str) -> int:
    body = {"model": "a0", "max_tokens": 200, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        return (await answer.read()).count(b"data: {")


if __name__ == "__main__":
    main()
