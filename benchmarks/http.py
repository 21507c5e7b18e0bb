"""Measure `loramux serve`: its start phase by phase, and its throughput and latency over HTTP.

    python -m benchmarks.http [--quick] [--parts start,load] [--model SHAPE|PATH]

start   seconds of each phase of a start with empty caches, and of the next one with those caches
load    streams and whole answers at rising numbers of clients, on the base and on several adapters:
        tokens/s, time to first token and inter-token latency, beside the engine without HTTP

Both parts run the real command with its default flags. On an NVIDIA GPU the model is a folder with
random weights in the shapes of Llama-3.1-8B, written to --folder first (16 GB); on a CPU it is the
installed default model. The load generator and the offline engine are processes of their own; the
offline engine starts after the server has stopped. Every run has its own prompts, which the prefix
cache does not hold; the offline engine gets the same ones.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.http_load import Body, LoadGenerator, Reply
from benchmarks.lib.machine import describe_machine
from benchmarks.lib.model_folder import write_model
from benchmarks.lib.random_weights import SHAPES, make_adapter
from benchmarks.lib.report import (
    Panel,
    ReportWriter,
    Section,
    Table,
    column,
    names,
    numbers,
    parse_arguments,
    start_report,
)
from benchmarks.lib.serve_process import StartedServer, started_server
from benchmarks.lib.traffic import Watch, make_request, milliseconds, percentile
from loramux import LLM
from loramux.base.process_environment import set_process_environment
from loramux.engine.engine import Engine
from loramux.models.folder import describe_model
from loramux.models.locate import locate_model
from loramux.types.model import BaseModelInfo
from loramux.types.request import Request

PARTS = ("start", "load")
LIMIT_S = 600.0
NUM_RUN_SEEDS = 1000
# Ids of ordinary text in every common vocabulary; the first 256 are often bytes.
FIRST_TOKEN, LAST_TOKEN = 300, 30_000
# Caches that the first start of a machine finds empty.
CACHE_VARIABLES = (
    "LORAMUX_CACHE",
    "TRITON_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of clients, and of adapters that they use in turn; 0 is the base."""

    num_clients: int
    num_adapters: int

    def __str__(self) -> str:
        return f"{self.num_clients} clients, {self.num_adapters} adapters"


@dataclass(slots=True)
class Measured:
    """Figures of one case: medians and percentiles over all its runs."""

    rates: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is served and which requests are sent; the offline process gets the same plan."""

    model: str
    device: str | None
    dtype: str | None
    folders: tuple[Path, ...]
    cases: tuple[Case, ...]
    num_input: int
    num_output: int
    rounds: int
    repeats: int
    last_token: int

    def prompts(self, case: Case, run: int) -> list[list[int]]:
        """Return the prompts of a run; no two runs of a process share one."""
        source = random.Random(f"{case} {run}")
        return [
            [source.randrange(FIRST_TOKEN, self.last_token) for _ in range(self.num_input)]
            for _ in range(case.num_clients * self.rounds)
        ]

    def folder_of(self, case: Case, index: int) -> Path | None:
        return self.folders[index % case.num_adapters] if case.num_adapters else None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench http", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs")
    parser.add_argument("--model", help=f"{', '.join(SHAPES)}, or what serve's --model takes")
    parser.add_argument("--device", help="for server and engine; default: theirs")
    parser.add_argument("--dtype", help="for server and engine; default: theirs")
    parser.add_argument("--clients", type=numbers, help="numbers of clients, such as 1,32,256")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input", type=int, help="tokens of a prompt")
    parser.add_argument("--output", type=int, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, help="requests of each client in a run")
    parser.add_argument("--repeats", type=int, help="runs of each case")
    parser.add_argument(
        "--settle",
        type=float,
        metavar="SECONDS",
        help="wait before the load, while an idle engine prepares the rest of its graphs",
    )
    parser.add_argument("--folder", type=Path, help="where weights and caches are written")
    parser.add_argument(
        "--evict-weights", action="store_true", help="starts read the weights from disk"
    )
    return parser


def main() -> None:
    arguments = parse_arguments(make_parser())
    # For the processes of the load and of the offline engine, as the server does for its engine.
    set_process_environment()
    is_gpu = torch.cuda.is_available() and not str(arguments.device or "").startswith("cpu")
    set_defaults(arguments, is_gpu=is_gpu)
    machine = describe_machine(arguments.dtype or "auto", "cuda" if is_gpu else "cpu")
    report = start_report("http", arguments, machine)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-http-") as name:
        plan = make_plan(arguments, Path(name))
        if "start" in arguments.parts:
            for variable in CACHE_VARIABLES:
                os.environ[variable] = str(Path(name) / "caches" / variable.lower())
            report.add(measure_starts(plan, Path(name), is_evicted=arguments.evict_weights))
        if "load" in arguments.parts:
            measure_load(plan, Path(name), report, settle_s=arguments.settle)
    report.finish()


def set_defaults(arguments: argparse.Namespace, *, is_gpu: bool) -> None:
    """Fill in the options that were not given: sizes for a GPU or for a CPU, full or quick."""
    is_quick = arguments.quick
    gpu_clients = [1, 32, 256] if is_quick else [1, 32, 128, 256]
    cpu_clients = [1, 8] if is_quick else [1, 8, 32]
    defaults = {
        "model": "llama-3.1-8b" if is_gpu else None,
        "clients": gpu_clients if is_gpu else cpu_clients,
        "input": 128 if is_gpu else 64,
        "output": 128 if is_gpu else 32,
        "rounds": 2 if is_gpu and not is_quick else 1,
        "repeats": 3 if is_gpu and not is_quick else 1,
        "settle": 10.0 if is_gpu else 0.0,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def make_plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    """Write the model, if it is named by its shapes, and the adapters."""
    model = arguments.model
    if model in SHAPES:
        began = time.perf_counter()
        path = write_model(folder / model, SHAPES[model])
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - began
        print(f"{num_bytes / 1e9:.1f} GB of random weights in {seconds:.1f} s", flush=True)
    else:
        path = locate_model(model)
    base = describe_model(path)
    folders = make_adapters(arguments, base, folder) if "load" in arguments.parts else ()
    counts = (0, len(folders)) if folders else (0,)
    return Plan(
        model=str(path),
        device=arguments.device,
        dtype=arguments.dtype,
        folders=folders,
        cases=tuple(Case(clients, count) for clients in arguments.clients for count in counts),
        num_input=arguments.input,
        num_output=arguments.output,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        last_token=min(LAST_TOKEN, SHAPES.get(arguments.model, {}).get("vocab_size", LAST_TOKEN)),
    )


def make_adapters(
    arguments: argparse.Namespace, base: BaseModelInfo, folder: Path
) -> tuple[Path, ...]:
    def make(number: int) -> Path:
        place, dtype = folder / f"adapter-{number}", torch.bfloat16
        return make_adapter(place, base, rank=arguments.rank, seed=number, dtype=dtype)

    with ThreadPoolExecutor() as threads:
        return tuple(threads.map(make, range(arguments.adapters)))


@contextmanager
def serving(plan: Plan, folder: Path, *, with_adapters: bool) -> Iterator[StartedServer]:
    """Yield the server with its default flags; the base is named "base" in requests."""
    flags = ["--model", plan.model, "--served-model-name", "base"]
    for name, value in (("--device", plan.device), ("--dtype", plan.dtype)):
        flags += [name, value] if value is not None else []
    if with_adapters and plan.folders:
        flags += ["--lora-modules", *(f"{path.name}={path}" for path in plan.folders)]
    with started_server(flags, folder=folder / "data", limit_s=LIMIT_S) as server:
        yield server


def measure_starts(plan: Plan, folder: Path, *, is_evicted: bool) -> Section:
    """Start the server with empty caches and then again; the table has a row for each phase."""
    starts: dict[str, StartedServer] = {}
    for name in ("cold s", "warm s"):
        if is_evicted:
            evict(Path(plan.model))
        with serving(plan, folder, with_adapters=False) as server:
            starts[name] = server
        print(f"  {name[:-2]} start: {server.first_answer_s:.1f} s", flush=True)
    weights = "read from disk" if is_evicted else "in the page cache if they fit there"
    return Section(
        title="Start of the server",
        name="start",
        rows=start_rows(starts),
        notes=(
            f"Cold: empty caches ({', '.join(CACHE_VARIABLES)}); warm: the start after it. The "
            f"weights are {weights}.",
            "Output of the warm start:\n\n```text\n" + "\n".join(server.banner) + "\n```",
        ),
    )


def start_rows(starts: dict[str, StartedServer]) -> Table:
    phases = dict.fromkeys(phase for server in starts.values() for phase in server.phases)
    rows: Table = [
        {"phase": phase, **{name: s.phases.get(phase) for name, s in starts.items()}}
        for phase in phases
    ]
    rows.append({"phase": "total", **{name: s.first_answer_s for name, s in starts.items()}})
    return rows


def evict(model: Path) -> None:
    """Drop the model's files from the page cache."""
    for path in model.rglob("*") if model.is_dir() else [model]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_load(plan: Plan, folder: Path, report: ReportWriter, *, settle_s: float) -> None:
    with serving(plan, folder, with_adapters=True) as server:
        print(f"  server ready after {server.first_answer_s:.1f} s", flush=True)
        time.sleep(settle_s)
        with LoadGenerator(server.url, limit_s=LIMIT_S) as load:
            streamed = [measure_served(plan, case, load, is_stream=True) for case in plan.cases]
            whole = [measure_served(plan, case, load, is_stream=False) for case in plan.cases]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        offline = process.submit(run_offline, plan).result()
    report.add(load_section(plan, streamed, whole, offline))


def measure_served(plan: Plan, case: Case, load: LoadGenerator, *, is_stream: bool) -> Measured:
    """Send a short run that is not measured, and then the measured ones."""
    kind = "streams" if is_stream else "whole"
    # Streams and whole answers have different prompts, so that none finds a cached prefix.
    first = 0 if is_stream else NUM_RUN_SEEDS
    load.ask(bodies(plan, case, -1 - first, num_output=2, is_stream=is_stream), case.num_clients)
    measured = Measured()
    for run in range(first, first + plan.repeats):
        chosen = bodies(plan, case, run, num_output=plan.num_output, is_stream=is_stream)
        took(measured, load.ask(chosen, case.num_clients), plan.num_output)
    print(f"  HTTP {kind:8s} {case!s:24s} {measured.tokens_per_s:9,.1f} tok/s", flush=True)
    return measured


def bodies(plan: Plan, case: Case, run: int, *, num_output: int, is_stream: bool) -> list[Body]:
    found: list[Body] = []
    for index, prompt in enumerate(plan.prompts(case, run)):
        folder = plan.folder_of(case, index)
        body: Body = {
            "model": folder.name if folder else "base",
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
        }
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append(body)
    return found


def took(measured: Measured, replies: Sequence[Reply], num_output: int) -> None:
    """Add a run's replies to the figures; every answer must have all its tokens."""
    wrong = [reply.num_tokens for reply in replies if reply.num_tokens != num_output]
    assert not wrong, f"answers of {wrong} tokens instead of {num_output}"
    seconds = max(r.finished_s for r in replies) - min(r.sent_s for r in replies)
    measured.rates.append(len(replies) * num_output / seconds)
    for reply in replies:
        times = reply.token_s
        measured.answers_s.append(reply.finished_s - reply.sent_s)
        measured.ttfts_s += [times[0] - reply.sent_s] if times else []
        measured.gaps_s += [after - before for before, after in zip(times, times[1:], strict=False)]
        measured.texts.append(reply.text)


def run_offline(plan: Plan) -> list[Measured]:
    """Run the streams' requests on an engine in this process, with as many open at a time."""
    settings: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype}
    llm = LLM(plan.model, **{name: value for name, value in settings.items() if value is not None})
    llm.engine.prepare_all()
    cids = {folder: llm.register_adapter(folder) for folder in plan.folders}
    found = []
    for case in plan.cases:
        measured = Measured()
        for run in range(-1, plan.repeats):
            num_output = plan.num_output if run >= 0 else 2
            requests = [
                engine_request(plan, case, index, prompt, cids, num_output)
                for index, prompt in enumerate(plan.prompts(case, run))
            ]
            tokens = run_requests(llm.engine, requests, case.num_clients, measured, run >= 0)
            if run >= 0:
                measured.texts += [llm.tokenizer.decode(ids) for ids in tokens]
        print(f"  offline       {case!s:24s} {measured.tokens_per_s:9,.1f} tok/s", flush=True)
        found.append(measured)
    return found


def engine_request(  # noqa: PLR0913
    plan: Plan,
    case: Case,
    index: int,
    prompt: list[int],
    cids: dict[Path, str],
    num_output: int,
) -> Request:
    folder = plan.folder_of(case, index)
    selection = ((cids[folder], 1.0),) if folder else ()
    return make_request(str(index), prompt, selection, num_output)


def run_requests(
    engine: Engine, requests: list[Request], num_open: int, measured: Measured, is_measured: bool
) -> list[list[int]]:
    """Keep `num_open` requests in the engine until all are finished; return their tokens."""
    watch = Watch()
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = iter(requests)
    began = time.perf_counter()
    while True:
        while len(watch.open) < num_open and (request := next(waiting, None)) is not None:
            engine.add(request)
            watch.add(request, time.perf_counter())
        if not watch.open:
            break
        events = engine.step()
        watch.take(events, time.perf_counter())
        for event in events:
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
    if is_measured:
        measured.rates.append(watch.run.num_output / (time.perf_counter() - began))
        measured.ttfts_s += watch.run.ttfts_s
        measured.gaps_s += watch.run.gaps_s
    return list(tokens.values())


def load_section(
    plan: Plan, streamed: list[Measured], whole: list[Measured], offline: list[Measured]
) -> Section:
    rows: Table = []
    bases: dict[int, Measured] = {}
    for case, streams, answers, alone in zip(plan.cases, streamed, whole, offline, strict=True):
        base = bases.setdefault(case.num_clients, streams)
        rows.append(
            {
                "clients": case.num_clients,
                "adapters": case.num_adapters,
                "streams tok/s": streams.tokens_per_s,
                "whole tok/s": answers.tokens_per_s,
                "offline tok/s": alone.tokens_per_s,
                "streams / offline": streams.tokens_per_s / alone.tokens_per_s,
                "whole / offline": answers.tokens_per_s / alone.tokens_per_s,
                "streams / base": streams.tokens_per_s / base.tokens_per_s,
                **latencies("first token", streams.ttfts_s, alone.ttfts_s),
                **latencies("inter-token", streams.gaps_s, alone.gaps_s),
                "whole P50 ms": milliseconds(percentile(answers.answers_s, 50)),
                "whole P99 ms": milliseconds(percentile(answers.answers_s, 99)),
                "same texts": same_share(streams.texts, alone.texts),
            }
        )
    return Section(
        title=f"Requests of {plan.num_input} tokens, answers of {plan.num_output}",
        name="load",
        rows=rows,
        notes=(
            "Clients send their requests at the same time and the next one after the answer. "
            "Throughput counts output tokens from the first request to the last token, prefill "
            "included. Offline is the engine's step loop without server and tokenizer.",
        ),
        panels=(load_panel(rows),),
    )


def latencies(what: str, served: list[float], offline: list[float]) -> dict[str, object]:
    return {
        f"{what} P50 ms": milliseconds(percentile(served, 50)),
        f"{what} P99 ms": milliseconds(percentile(served, 99)),
        f"offline {what} P50 ms": milliseconds(percentile(offline, 50)),
    }


def load_panel(rows: Table) -> Panel:
    kinds = ("streams tok/s", "whole tok/s", "offline tok/s")
    return Panel(
        title="Throughput over HTTP and offline",
        x_label="clients (adapters)",
        y_label="tokens/s",
        x=[f"{row['clients']} ({row['adapters']})" for row in rows],
        series={kind: column(rows, kind) for kind in kinds},
    )


def same_share(ours: list[str], theirs: list[str]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


if __name__ == "__main__":
    main()
