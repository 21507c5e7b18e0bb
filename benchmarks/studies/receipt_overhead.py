"""Measure tokens/s of a server with receipts in SQLite beside one without receipts.

    python -m benchmarks.studies.receipt_overhead [--blocks 4] [--rounds 5] [--requests 32]

Two servers run at once and rounds alternate between them, so that other work on the machine affects
both. Each block restarts both in the other order, because two processes of one program may differ
by more than receipts cost. The result is the median over pairs of adjacent rounds. The CPU time of
the HTTP process, which writes the receipts, is reported separately; it misses what is written in
the quarter of a second after a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.paired_rounds import Round, interval, run_round
from benchmarks.lib.report import Table, parse_arguments, write_table
from loramux.registry.records import ReceiptFilter
from loramux.registry.registry import Registry
from loramux.registry.rows.receipts import MAX_LIMIT
from tests.serve_factory import RunningServer, running_server

WITHOUT, WITH = "off", "SQLite"

Rounds = dict[str, list["Round"]]


def main() -> None:
    args = options()
    machine = describe_machine(args.dtype)
    with tempfile.TemporaryDirectory() as name:
        rounds: Rounds = {WITHOUT: [], WITH: []}
        num_kept = sum(run_block(args, Path(name), i, rounds) for i in range(args.blocks))
    table = summarize(rounds, num_kept)
    write_table("receipt-overhead", table, machine, args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32, help="requests per round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4, help="restarts of both servers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per server and block")
    return parse_arguments(parser)


def run_block(args: argparse.Namespace, folder: Path, block: int, rounds: Rounds) -> int:
    """Run the rounds of a block; return the number of receipts in the registry."""
    flags = ["--dtype", args.dtype, "--device-memory", "512MiB", "--served-model-name", "base"]
    flags += ["--no-prefix-cache", *(["--model", args.model] if args.model else [])]
    data = {kind: folder / f"{kind}-{block}" for kind in rounds}
    receipts = {WITHOUT: "off", WITH: "on"}
    with ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for kind in order_of(block):
            own = ["--data", str(data[kind]), "--receipts", receipts[kind]]
            running = running_server(folder / f"{kind}-{block}.log", *flags, *own)
            servers[kind] = stack.enter_context(running)
        for server in servers.values():
            run_round(server, args, seed=-1)
        for number in range(args.rounds):
            for kind in order_of(number + block):
                rounds[kind].append(run_round(servers[kind], args, seed=number))
                show(kind, rounds[kind][-1])
    with Registry(data[WITH] / "registry.db") as registry:
        num_kept = len(registry.find_receipts(ReceiptFilter(limit=MAX_LIMIT)))
    num_requests = (args.rounds + 1) * args.requests
    assert num_kept == min(num_requests, MAX_LIMIT), (
        f"{num_kept} of {num_requests} receipts were kept"
    )
    return num_kept


def order_of(number: int) -> list[str]:
    """Alternate the order of the servers."""
    return [WITHOUT, WITH] if number % 2 == 0 else [WITH, WITHOUT]


def show(kind: str, one: Round) -> None:
    times = f"CPU ms/request: {one.http_ms:.2f} of {one.all_ms:.1f}"
    print(f"  {kind:8s} {one.tokens_per_s:8.1f} tok/s  {times}", flush=True)


def summarize(rounds: Rounds, num_kept: int) -> Table:
    speeds = {kind: [one.tokens_per_s for one in found] for kind, found in rounds.items()}
    # The engine's time is taken from the same rounds for both; only the HTTP process is compared.
    engine_ms = [one.all_ms - one.http_ms for one in rounds[WITHOUT]]
    costs = {
        kind: [one.http_ms + other_ms for one, other_ms in zip(found, engine_ms, strict=True)]
        for kind, found in rounds.items()
    }
    http = {kind: [one.http_ms for one in found] for kind, found in rounds.items()}
    rows = {
        "tokens/s": speeds,
        "CPU ms/request, HTTP process": http,
        "CPU ms/request, with the engine's of the same rounds": costs,
    }
    return [row(figure, values, num_kept) for figure, values in rows.items()]


def row(figure: str, values: dict[str, list[float]], num_kept: int) -> dict[str, object]:
    ratios = [b / a for a, b in zip(values[WITHOUT], values[WITH], strict=True)]
    low, high = interval(ratios)
    return {
        "figure": figure,
        "receipts off": round(statistics.median(values[WITHOUT]), 2),
        "in SQLite": round(statistics.median(values[WITH]), 2),
        "median of ratios": round(statistics.median(ratios), 4),
        "95% interval": f"{low:.4f} to {high:.4f}",
        "rounds": len(ratios),
        "receipts kept": num_kept,
    }


if __name__ == "__main__":
    main()
