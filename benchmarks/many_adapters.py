"""Compare a server with thousands of small adapters with one that has a few.

    python -m benchmarks.many_adapters [--many 3000] [--few 20] [--rounds 3]

In each round both servers are started one after the other and then measured in turns, each of them
while the other is idle: the time until the server listens, the time of a token once every adapter
was used, and the time until a killed engine answers again. The order alternates between rounds, and
the table has the medians of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx2
import torch
from safetensors.torch import save_file

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Table, parse_arguments, write_table
from loramux.models.default_model import default_model_path
from loramux.models.folder import describe_model
from loramux.types.model import BaseModelInfo
from tests.serve_factory import RunningServer, running_server

PROMPT = [100, 200, 300, 400]
NUM_CLIENTS = 16
HEAL_LIMIT_S = 120.0
HEAL_POLL_S = 0.02

LISTEN, TOKEN, HEAL = "s until it listens", "ms per token", "s until it answers after kill -9"


@dataclass
class Figures:
    """The measurements of one size over all rounds, by the name of the figure."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def best(self, name: str) -> float:
        return min(self.values[name])


def main() -> None:
    args = options()
    machine = describe_machine(args.dtype)
    figures = {size: Figures() for size in (args.few, args.many)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = default_model_path() if args.model is None else Path(args.model)
        base = describe_model(model)
        adapters = [
            make_small_adapter(folder / "adapters" / f"a{number:05d}", base, args.bytes, number)
            for number in range(max(figures))
        ]
        for number in range(args.rounds):
            sizes = sorted(figures, reverse=number % 2 == 1)
            run_round(args, folder / f"round-{number}", adapters, {s: figures[s] for s in sizes})
    write_table("many-adapters", summarize(args.few, args.many, figures), machine, args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: the installed SmolLM2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--few", type=int, default=20)
    parser.add_argument("--many", type=int, default=3000)
    parser.add_argument("--bytes", type=int, default=10_000, help="size of an adapter's weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8, help="timed answers in each round")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a timed answer")
    parser.add_argument("--kills", type=int, default=2, help="kills of the engine in each round")
    parser.add_argument("--flags", default="", help="further flags of both servers")
    return parse_arguments(parser)


def make_small_adapter(folder: Path, base: BaseModelInfo, num_bytes: int, seed: int) -> Path:
    """Write a float32 adapter of rank 1 on q_proj of as many layers as fit into the size."""
    generator = torch.Generator().manual_seed(seed)
    targets = [target for target in base.targets if target.projection == "q_proj"]
    tensors: dict[str, torch.Tensor] = {}
    layers: list[int | None] = []
    for target in targets:
        if (
            layers
            and (len(layers) + 1) * 4 * (target.in_features + target.out_features) > num_bytes
        ):
            break
        key = f"base_model.model.{target.path}"
        a = torch.randn(1, target.in_features, generator=generator)
        tensors[f"{key}.lora_A.weight"] = a / target.in_features**0.5
        tensors[f"{key}.lora_B.weight"] = torch.randn(target.out_features, 1, generator=generator)
        layers.append(target.layer)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name,
        "r": 1,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "layers_to_transform": layers,
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def run_round(
    args: argparse.Namespace, folder: Path, adapters: list[Path], figures: dict[int, Figures]
) -> None:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        servers: dict[int, Served] = {}
        for size, found in figures.items():
            began = time.monotonic()
            running = started(args, folder / str(size), adapters[:size])
            server = Served(stack.enter_context(running), adapters[:size])
            found.values[LISTEN].append(time.monotonic() - began)
            servers[size] = server
        for server in servers.values():
            server.use_all()
        for number in range(args.streams):
            for size, server in servers.items():
                gaps = server.token_gaps(number, args.tokens)
                figures[size].values[TOKEN].append(1000 * statistics.median(gaps))
        for number in range(args.kills):
            for size, server in servers.items():
                figures[size].values[HEAL].append(server.heal_s(number))
    for size, found in figures.items():
        shown = ", ".join(f"{values[-1]:.2f} {name}" for name, values in found.values.items())
        print(f"  {size:5d} adapters: {shown}", flush=True)


def started(
    args: argparse.Namespace, folder: Path, adapters: list[Path]
) -> contextlib.AbstractContextManager[RunningServer]:
    folder.mkdir()
    flags = ["--dtype", args.dtype, "--disk-folder", str(folder / "images"), *args.flags.split()]
    flags += ["--model", args.model] if args.model else []
    flags += ["--lora-modules", *(f"{adapter.name}={adapter}" for adapter in adapters)]
    return running_server(folder / "log", *flags, timeout_s=300)


class Served:
    """A running server and the requests that are sent to it."""

    def __init__(self, server: RunningServer, adapters: list[Path]) -> None:
        self._server = server
        self._names = [adapter.name for adapter in adapters]
        self._client = httpx2.Client(base_url=server.url, timeout=60)

    def use_all(self) -> None:
        """Generate a token with every adapter, so that all are resident."""
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(self._generate, self._names))

    def token_gaps(self, number: int, num_tokens: int) -> list[float]:
        """Stream an answer and return the seconds between its tokens."""
        body = {**self._body(self._name(number)), "max_tokens": num_tokens, "stream": True}
        with self._client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            times = [time.perf_counter() for _ in events(reply)]
        return [after - before for before, after in pairwise(times)]

    def heal_s(self, number: int) -> float:
        """Kill the engine and return the seconds until an adapter answers."""
        (pid,) = self._server.engine_pids
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() - began < HEAL_LIMIT_S:
            with contextlib.suppress(httpx2.HTTPStatusError):
                self._generate(self._name(number))
                return time.monotonic() - began
            time.sleep(HEAL_POLL_S)
        raise TimeoutError("the engine did not come back")

    def _generate(self, name: str) -> None:
        self._client.post("/v1/completions", json=self._body(name)).raise_for_status()

    def _name(self, number: int) -> str:
        """Spread the numbered requests over all adapters, the same way for every size."""
        return self._names[number * 7 % len(self._names)]

    def _body(self, name: str) -> dict[str, object]:
        return {
            "model": name,
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        }


def events(reply: httpx2.Response) -> Iterator[str]:
    """Yield the lines of an event stream that have a token."""
    for line in reply.iter_lines():
        if line.startswith("data: ") and '"text"' in line:
            yield line


def summarize(few: int, many: int, figures: dict[int, Figures]) -> Table:
    rows: Table = []
    for name, limit in ((LISTEN, "+ 3 s"), (HEAL, "+ 2 s"), (TOKEN, "x 1.05")):
        base, other = figures[few].median(name), figures[many].median(name)
        rows.append(
            {
                "figure": name,
                f"{few} adapters": base,
                f"{many} adapters": other,
                "difference": other - base,
                "ratio": other / base,
                "ratio of the best": figures[many].best(name) / figures[few].best(name),
                "goal": limit,
            }
        )
    return rows


if __name__ == "__main__":
    main()
