"""Measure tokens/s of a server with API keys, limits and audit log beside one without.

    python -m benchmarks.studies.guard_overhead [--blocks 2] [--rounds 5] [--requests 32]

Both servers have a registry and write receipts. The guarded one also needs a key, whose tenant and
which itself have limits of requests, tokens and concurrent requests, so that every request is
authenticated, charged to both accounts and answered with rate-limit headers; its audit log is
signed. Servers and rounds alternate as in receipt_overhead.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.paired_rounds import interval, run_round
from benchmarks.lib.report import Table, write_table
from benchmarks.studies.receipt_overhead import Rounds, options, show
from loramux.base.signing import make_key_files
from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.registry.tenants import SettingChanges
from loramux.types.access import KeyScope
from tests.serve_factory import RunningServer, running_server

OPEN, GUARDED = "open", "guarded"
# Never reached, so that every request is counted and none refused.
LIMITS = {
    "requests_per_minute": 10**6,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 10**4,
}


def main() -> None:
    args = options()
    machine = describe_machine(args.dtype)
    rounds: Rounds = {OPEN: [], GUARDED: []}
    with tempfile.TemporaryDirectory() as name:
        for block in range(args.blocks):
            run_block(args, Path(name), block, rounds)
    write_table("guard-overhead", summarize(rounds), machine, args)


def run_block(args: argparse.Namespace, folder: Path, block: int, rounds: Rounds) -> None:
    flags = ["--dtype", args.dtype, "--device-memory", "512MiB", "--served-model-name", "base"]
    flags += ["--no-prefix-cache", "--receipts", "on"]
    flags += ["--model", args.model] if args.model else []
    data = {kind: folder / f"{kind}-{block}" for kind in rounds}
    for place in data.values():
        place.mkdir()
    Registry(data[OPEN] / "registry.db").close()
    key = make_guards(data[GUARDED])
    own = {OPEN: [], GUARDED: ["--receipt-key", str(data[GUARDED] / "key.pem")]}
    keys = {OPEN: None, GUARDED: key}
    with ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for kind in order_of(block):
            running = running_server(
                folder / f"{kind}-{block}.log", *flags, "--data", str(data[kind]), *own[kind]
            )
            servers[kind] = stack.enter_context(running)
        for kind, server in servers.items():
            run_round(server, args, seed=-1, api_key=keys[kind])
        for number in range(args.rounds):
            for kind in order_of(number + block):
                found = run_round(servers[kind], args, seed=number, api_key=keys[kind])
                rounds[kind].append(found)
                show(kind, found)


def make_guards(data: Path) -> str:
    """Make a key with limits for a tenant with limits; return the key."""
    make_key_files(data / "key.pem")
    with Registry(data / "registry.db") as registry:
        registry.tenants.set("acme", SettingChanges(limits=LIMITS))
        rights = KeyRights(tenant="acme", scopes=frozenset({KeyScope.INFER}))
        made = registry.access.create_key(rights)
        registry.tenants.set_key_limits(made.record.key_id, LIMITS)
    return made.text


def order_of(number: int) -> list[str]:
    return [OPEN, GUARDED] if number % 2 == 0 else [GUARDED, OPEN]


def summarize(rounds: Rounds) -> Table:
    engine_ms = [one.all_ms - one.http_ms for one in rounds[OPEN]]
    figures = {
        "tokens/s": lambda one, _: one.tokens_per_s,
        "CPU ms/request, HTTP process": lambda one, _: one.http_ms,
        "CPU ms/request, with the engine's of the same rounds": lambda one, other: (
            one.http_ms + other
        ),
    }
    table = []
    for name, value in figures.items():
        pairs = [
            (value(one, ms), value(other, ms))
            for one, other, ms in zip(rounds[OPEN], rounds[GUARDED], engine_ms, strict=True)
        ]
        ratios = sorted(guarded / plain for plain, guarded in pairs)
        low, high = interval(ratios)
        table.append(
            {
                "figure": name,
                "open": round(statistics.median([plain for plain, _ in pairs]), 2),
                "guarded": round(statistics.median([guarded for _, guarded in pairs]), 2),
                "median of ratios": round(statistics.median(ratios), 4),
                "95% interval": f"{low:.4f} to {high:.4f}",
                "rounds": len(pairs),
            }
        )
    return table


if __name__ == "__main__":
    main()
