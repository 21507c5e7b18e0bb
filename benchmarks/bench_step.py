"""One decode step of the whole engine: base and LoRA, beside the roofline of the machine.

    python -m benchmarks.bench_step [--batches 1,32] [--adapters 8] [--ranks 16] [--sites all]
    python -m benchmarks.bench_step --cases [--peers FOLDER]
    python -m benchmarks.bench_step --transformers

"step" is the time from one step to the next by the host's clock, "graph" that of the CUDA graph
alone. "base W" and "base MHz": the card's while the base was timed, by nvidia-smi. --cases: what
LoRA adds to a layer in nine batches, each in turns with the base, beside other servers' kernels if
a folder with them is given (see benchmarks/gpu_lora_kernels.py). --transformers: also times
`generate`.
On a CPU, shapes of SmolLM2; on a GPU, of Llama-3.1-8B. All weights are random.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_report import (
    Panel,
    ReportWriter,
    Section,
    add_output_options,
    draw,
    names,
    numbers,
    peers_folder,
    start_report,
)
from benchmarks.card_power import PowerMeter, visible_device
from benchmarks.decode_timing import WARM_STEPS, StepTime, mean_of, spread, time_decode
from benchmarks.lora_cases import CASES, RANK, Case
from benchmarks.machine import describe_machine
from benchmarks.random_adapters import RandomAdapters
from benchmarks.random_model import add_engine_options, dtype_of, is_gpu, make_engine, shape_of
from benchmarks.report import Table
from benchmarks.roofline import H200_BYTES_PER_S, H200_FLOPS, Roofline, measure_cpu, roofline_of
from benchmarks.traffic import milliseconds
from benchmarks.transformers_peer import GenerateWork, time_engine, time_transformers


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench step", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=numbers)
    parser.add_argument("--adapters", type=numbers, default=[8], help="in the batch")
    parser.add_argument("--ranks", type=numbers, default=[16])
    parser.add_argument("--sites", type=names(("qkvo", "all")), default=["all"])
    parser.add_argument("--context", type=int, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, help="that are timed")
    parser.add_argument("--warm", type=int, default=WARM_STEPS, help="steps before those")
    parser.add_argument("--cases", action="store_true", help="nine batches instead of the above")
    parser.add_argument("--rounds", type=int, help="of each case, the base before and behind")
    parser.add_argument(
        "--peers", type=peers_folder, metavar="FOLDER", help="with --cases, on a GPU"
    )
    parser.add_argument("--transformers", action="store_true", help="time `generate` as well")
    parser.add_argument("--generate", type=numbers, metavar="BATCH,IN,OUT", help="its work")
    parser.add_argument("--bandwidth", type=float, metavar="TB/S", help="of the roofline")
    parser.add_argument("--tflops", type=float, help="of the roofline")
    add_engine_options(parser)
    add_output_options(parser)
    return parser


def fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not asked for: large on a GPU, a minute on a CPU."""
    on_gpu = is_gpu(arguments)
    defaults: dict[str, Any] = {
        "model": "llama-3.1-8b" if on_gpu else "smollm2-135m",
        "batches": [1, 32, 128, 256] if on_gpu else [1, 8],
        "context": 512 if on_gpu else 64,
        "steps": 48 if on_gpu else 8,
        "rounds": 3 if on_gpu else 1,
        "generate": [32, 128, 128] if on_gpu else [8, 16, 8],
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def row_of(base: StepTime, lora: StepTime, limit: Roofline, num_layers: int) -> dict[str, object]:
    roofline = limit.tokens_per_s(base.batch, base.context)
    graphs = (base.graph_s, lora.graph_s)
    added_s = None if None in graphs else (graphs[1] or 0.0) - (graphs[0] or 0.0)
    return {
        "base step ms": milliseconds(base.step_s),
        "base graph ms": milliseconds(base.graph_s),
        "LoRA step ms": milliseconds(lora.step_s),
        "LoRA graph ms": milliseconds(lora.graph_s),
        "base tok/s": base.tokens_per_s,
        "LoRA tok/s": lora.tokens_per_s,
        "LoRA / base": base.step_s / lora.step_s,
        "context": base.context,
        "roofline tok/s": roofline,
        "base / roofline": base.tokens_per_s / roofline,
        "LoRA us a layer": 1e6 * (lora.step_s - base.step_s) / num_layers,
        "in the graph": None if added_s is None else 1e6 * added_s / num_layers,
        "base last / first": base.drift,
        "base W": None if base.power is None else base.power.watts,
        "base MHz": None if base.power is None else base.power.mhz,
    }


class StepBench:
    def __init__(self, arguments: argparse.Namespace, out: ReportWriter) -> None:
        self._arguments = arguments
        self._out = out
        model, self.engine = make_engine(arguments)
        self._adapters = RandomAdapters(self.engine)
        self._meter = PowerMeter(visible_device()) if is_gpu(arguments) else None
        self._num_layers = model.config.num_layers
        rates = (H200_BYTES_PER_S, H200_FLOPS)
        if not is_gpu(arguments):
            rates = measure_cpu(model.decoder.dtype)
        self._limit = roofline_of(
            model,
            bytes_per_s=arguments.bandwidth * 1e12 if arguments.bandwidth else rates[0],
            flops=arguments.tflops * 1e12 if arguments.tflops else rates[1],
        )

    def run_grid(self) -> None:
        rows: Table = []
        wanted = self._arguments
        for batch in wanted.batches:
            base = self._time([], batch)
            for sites in wanted.sites:
                for rank in wanted.ranks:
                    for count in sorted({min(count, batch) for count in wanted.adapters}):
                        lora = self._time(self._adapters.add([rank] * count, sites), batch)
                        facts = {"batch": batch, "adapters": count, "rank": rank, "sites": sites}
                        rows.append({**facts, **row_of(base, lora, self._limit, self._num_layers)})
                        print_line(rows[-1])
        self._out.add(grid_section(rows, self._limit))

    def run_cases(self) -> Table:
        """The base is timed before and behind every case, in turns: hot cards are slower."""
        rows: Table = []
        bases: dict[int, StepTime] = {}
        for case in fitting(CASES, self.engine.scheduler.config.max_sequences):
            cids = self._adapters.add([RANK] * case.num_adapters, case.sites)
            order = [cids[number] for number in case.adapters().tolist()]
            base = [bases.get(case.num_rows) or self._time([], case.num_rows)]
            lora = []
            for _ in range(self._arguments.rounds):
                lora.append(self._time(order, case.num_rows))
                base.append(self._time([], case.num_rows))
            self._adapters.forget(cids)
            bases[case.num_rows] = base[-1]
            times = (mean_of(base), mean_of(lora))
            rows.append(case_row(case, row_of(*times, self._limit, self._num_layers)))
            print_line(rows[-1])
        return rows

    def _time(self, cids: list[str], batch: int) -> StepTime:
        if cids:
            assert self.engine.residency.load_now(cids), "the pool is too small for the adapters"
            self.engine.residency.release(cids)
        arguments = self._arguments
        with self._meter or nullcontext() as meter:
            return time_decode(
                self.engine,
                spread(cids, batch),
                context=arguments.context,
                num_steps=arguments.steps,
                num_warm=arguments.warm,
                meter=meter,
            )


def fitting(cases: Iterable[Case], max_sequences: int) -> list[Case]:
    return [case for case in cases if case.num_rows <= max_sequences]


def case_row(case: Case, row: dict[str, object]) -> dict[str, object]:
    kept = ("base step ms", "LoRA step ms", "LoRA / base", "LoRA us a layer", "in the graph")
    return {
        "rows": case.num_rows,
        "sites": case.sites,
        "adapters": case.num_adapters,
        **{name: row[name] for name in kept},
        "goal us": case.goal_us,
    }


def grid_section(rows: Table, limit: Roofline) -> Section:
    x = [f"{row['batch']} rows, {row['adapters']} x r{row['rank']} {row['sites']}" for row in rows]
    series = {name: column(rows, name) for name in ("base tok/s", "LoRA tok/s", "roofline tok/s")}
    shares = {name: column(rows, name) for name in ("LoRA / base", "base / roofline")}
    return Section(
        title="Decode step",
        rows=rows,
        notes=(limit.note(),),
        panels=(
            Panel(title="Decode", x_label="batch", y_label="tokens/s", x=x, series=series),
            Panel(title="Shares", x_label="batch", y_label="ratio", x=x, series=shares),
        ),
    )


def cases_section(rows: Table, peers: Table) -> Section:
    """peers: rows of gpu_lora_kernels for the same cases, or none."""
    joined: Table = []
    for number, row in enumerate(rows):
        kernels = peers[number] if peers else {}
        own = {
            "ours, kernels alone": kernels.get("alone"),
            "ours, kernels added": kernels.get("added"),
        }
        known = {"rows", "sites", "adapters", "floor", "goal", "base", "alone", "added"}
        theirs = {name: value for name, value in kernels.items() if name not in known}
        joined.append({**row, **(own if peers else {}), **theirs})
    x = [f"{row['rows']} {row['sites']} {row['adapters']}" for row in rows]
    shown = ["LoRA us a layer", "in the graph", "goal us"]
    if peers:
        shown += [n for n in joined[0] if n.endswith(" added") and n != "ours, kernels added"]
    panel = Panel(
        title="What LoRA adds to a decoder layer",
        x_label="rows, sites, adapters",
        y_label="microseconds",
        x=x,
        series={name: column(joined, name) for name in shown},
    )
    note = (
        "Engine: (step with LoRA - base step) / layers, in us; the base before and behind each. "
        "Peers: their kernels in a graph."
    )
    return Section(
        title="LoRA in nine batches, rank 16", rows=joined, notes=(note,), panels=(panel,)
    )


def column(rows: Table, name: str) -> list[float | None]:
    values = [row.get(name) for row in rows]
    return [float(value) if isinstance(value, int | float) else None for value in values]


def print_line(row: dict[str, object]) -> None:
    cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  " + ", ".join(cells), flush=True)


def generate_section(work: GenerateWork, theirs: float, ours: float) -> Section:
    rows: Table = [
        {"system": "transformers generate", "tok/s": theirs, "ratio": 1.0},
        {"system": "loramux", "tok/s": ours, "ratio": ours / theirs},
    ]
    panel = Panel(
        title=f"{work.batch} requests, {work.num_input} in / {work.num_output} out",
        x_label="system",
        y_label="output tokens/s",
        x=[str(row["system"]) for row in rows],
        series={"tok/s": [theirs, ours]},
    )
    title = f"Whole answers: {work.batch} x {work.num_input} in / {work.num_output} out"
    return Section(title=title, rows=rows, panels=(panel,))


def time_peers(folder: Path | None) -> Table:
    """Ours and the peers' kernels on the nine cases; needs a GPU."""
    from benchmarks import gpu_lora_kernels

    peers = gpu_lora_kernels.import_peers(folder) if folder else None
    return gpu_lora_kernels.run_cases(peers)


def free_memory() -> None:
    """Of what nothing refers to any more, in circles perhaps."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    arguments = make_parser().parse_args()
    if arguments.plot_from is not None:
        draw(arguments.plot_from)
        return
    fill_defaults(arguments)
    out = start_report("step", arguments, describe_machine(arguments.dtype, arguments.device))
    work = GenerateWork(
        **dict(zip(("batch", "num_input", "num_output"), arguments.generate, strict=True))
    )
    theirs = 0.0
    if arguments.transformers:
        dtype = dtype_of(arguments)
        theirs = time_transformers(shape_of(arguments), work, device=arguments.device, dtype=dtype)
    bench = StepBench(arguments, out)
    if arguments.transformers:
        out.add(generate_section(work, theirs, time_engine(bench.engine, work)))
    rows: Table = []
    if arguments.cases:
        rows = bench.run_cases()
    else:
        bench.run_grid()
    bench.engine.close()
    del bench
    free_memory()
    if arguments.cases:
        out.add(cases_section(rows, time_peers(arguments.peers) if arguments.peers else []))
    out.finish()


if __name__ == "__main__":
    main()
