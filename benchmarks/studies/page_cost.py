"""Measure what open web pages cost a loaded server.

    python -m benchmarks.studies.page_cost [--pages 20] [--rounds 20] [--requests 32]

Rounds with and without followers of the live stream alternate on one server; a follower reads what
a page's view reads. The result is the median over pairs of adjacent rounds. The CPU time that the
HTTP process uses for the followers is measured by itself, on the idle server: unlike a rate, other
work on the machine hardly changes it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.paired_rounds import Round, cpu_seconds, interval, run_round
from benchmarks.lib.report import Table, parse_arguments, write_table
from tests.serve_factory import RunningServer, running_server


def main() -> None:
    args = options()
    machine = describe_machine(args.dtype)
    flags = ["--dtype", args.dtype, "--device-memory", "512MiB", "--served-model-name", "base"]
    flags += ["--no-prefix-cache", *(["--model", args.model] if args.model else [])]
    without: list[Round] = []
    followed: list[Round] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "log", *flags) as server,
    ):
        run_round(server, args, seed=-1)
        for number in range(args.rounds):
            pairs = [(without, 0), (followed, args.pages)]
            for found, num_pages in pairs if number % 2 == 0 else reversed(pairs):
                with following(server, num_pages):
                    found.append(run_round(server, args, seed=number))
                print(f"  {num_pages:3d} pages {found[-1].tokens_per_s:8.1f} tok/s", flush=True)
        idle = [cpu_share(server, args, num_pages) for num_pages in (0, args.pages)]
    write_table("page-cost", summarize(without, followed, idle), machine, args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pages", type=int, default=20, help="open pages")
    parser.add_argument("--requests", type=int, default=32, help="requests per round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each kind")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of an idle measurement")
    return parse_arguments(parser)


@contextmanager
def following(server: RunningServer, num_pages: int) -> Iterator[None]:
    """Keep live streams open, and checks that each had events."""
    client = httpx2.Client(
        base_url=server.url, timeout=30, limits=httpx2.Limits(max_connections=None)
    )
    counts = [0] * num_pages
    ended = threading.Event()

    def follow(number: int) -> None:
        with client.stream("GET", "/v1/live") as answer:
            assert answer.status_code == 200, answer.status_code
            for _ in answer.iter_raw():
                counts[number] += 1
                if ended.is_set():
                    return

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(num_pages)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        client.close()
    assert all(count > 1 for count in counts), counts


def cpu_share(server: RunningServer, args: argparse.Namespace, num_pages: int) -> float:
    """Return the share of a core that the HTTP process of the idle server uses."""
    with following(server, num_pages):
        time.sleep(2)
        before, _ = cpu_seconds(server)
        time.sleep(args.idle)
        after, _ = cpu_seconds(server)
    return (after - before) / args.idle


def summarize(without: list[Round], followed: list[Round], idle: list[float]) -> Table:
    # The engine's time is taken from the same rounds for both; only the HTTP process differs.
    engine_ms = [one.all_ms - one.http_ms for one in without]
    figures = {
        "tokens/s": ([one.tokens_per_s for one in without], [one.tokens_per_s for one in followed]),
        "CPU ms/request, HTTP process": (
            [one.http_ms for one in without],
            [one.http_ms for one in followed],
        ),
        "CPU ms/request, with the engine's of the same rounds": (
            [one.all_ms for one in without],
            [one.http_ms + own for one, own in zip(followed, engine_ms, strict=True)],
        ),
    }
    rows: Table = []
    for figure, (before, after) in figures.items():
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        low, high = interval(ratios)
        rows.append(
            {
                "figure": figure,
                "no page": round(statistics.median(before), 2),
                "pages": round(statistics.median(after), 2),
                "median of ratios": round(statistics.median(ratios), 4),
                "95% interval": f"{low:.4f} to {high:.4f}",
                "rounds": len(ratios),
            }
        )
    rows.append(
        {
            "figure": "share of a core, idle server, HTTP process",
            "no page": round(idle[0], 5),
            "pages": round(idle[1], 5),
        }
    )
    return rows


if __name__ == "__main__":
    main()
