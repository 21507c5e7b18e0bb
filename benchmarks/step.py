"""Time one decode step of the whole engine, base and LoRA, against the machine's roofline.

    python -m benchmarks.step [--batches 1,32] [--adapters 8] [--ranks 16] [--sites all]
    python -m benchmarks.step --cases [--peers FOLDER]
    python -m benchmarks.step --transformers

"step" is the time from one step to the next by the host's clock, "graph" the time of the CUDA graph
alone. "base W" and "base MHz" are the GPU's power and SM clock while the base was timed, read from
nvidia-smi. --cases measures what LoRA adds per layer in nine batches, alternating with the base,
beside other servers' kernels if --peers names a folder with them (see benchmarks/lib/gpu_lora.py).
--transformers also times transformers' `generate`. All weights are random; the shapes are those of
SmolLM2 on a CPU and of Llama-3.1-8B on a GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.lora_cases import CASES, RANK, Case
from benchmarks.lib.machine import PowerMeter, describe_machine, visible_device
from benchmarks.lib.peers import GenerateWork, time_engine, time_transformers
from benchmarks.lib.random_weights import (
    RandomAdapters,
    add_engine_options,
    dtype_of,
    is_gpu,
    make_engine,
    shape_of,
)
from benchmarks.lib.report import (
    Panel,
    ReportWriter,
    Section,
    Table,
    column,
    names,
    numbers,
    parse_arguments,
    peers_folder,
    start_report,
)
from benchmarks.lib.roofline import H200_BYTES_PER_S, H200_FLOPS, Roofline, measure_cpu, roofline_of
from benchmarks.lib.timing import WARM_STEPS, StepTime, mean_of, spread, time_decode
from benchmarks.lib.traffic import milliseconds

LORA_US = "LoRA us per layer"
GRAPH_US = "LoRA us per layer, graph"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench step", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--batches", type=numbers, help="sequences that decode")
    add("--adapters", type=numbers, default=[8], help="distinct adapters in the batch")
    add("--ranks", type=numbers, default=[16])
    add("--sites", type=names(("qkvo", "all")), default=["all"], help="linear layers with LoRA")
    add("--context", type=int, help="tokens of each sequence")
    add("--steps", type=int, help="timed steps")
    add("--warm", type=int, default=WARM_STEPS, help="steps before the timed ones")
    add("--cases", action="store_true", help="nine LoRA batches instead of the above")
    add("--rounds", type=int, help="rounds of each case, with the base before and after")
    add("--peers", type=peers_folder, metavar="FOLDER", help="with --cases, on a GPU")
    add("--transformers", action="store_true", help="time transformers' `generate` as well")
    add("--generate", type=numbers, metavar="BATCH,IN,OUT", help="work of --transformers")
    add("--bandwidth", type=float, metavar="TB/S", help="memory bandwidth of the roofline")
    add("--tflops", type=float, help="compute of the roofline")
    add_engine_options(parser)
    return parser


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Set options that were not given, by device."""
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
    graph_us = None
    if base.graph_s is not None and lora.graph_s is not None:
        graph_us = 1e6 * (lora.graph_s - base.graph_s) / num_layers
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
        LORA_US: 1e6 * (lora.step_s - base.step_s) / num_layers,
        GRAPH_US: graph_us,
        "base last / first": base.drift,
        "base W": None if base.power is None else base.power.watts,
        "base MHz": None if base.power is None else base.power.mhz,
    }


class StepBench:
    """Times decode steps of one engine on random weights."""

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
                        print_row(rows[-1])
        self._out.add(grid_section(rows, self._limit))

    def run_cases(self) -> Table:
        """Time every case between two timings of the base: a power-limited GPU slows down."""
        rows: Table = []
        bases: dict[int, StepTime] = {}
        for case in cases_up_to(self.engine.scheduler.config.max_sequences, CASES):
            cids = self._adapters.add([RANK] * case.num_adapters, case.sites)
            order = [cids[number] for number in case.adapters().tolist()]
            base = [bases.get(case.num_tokens) or self._time([], case.num_tokens)]
            lora = []
            for _ in range(self._arguments.rounds):
                lora.append(self._time(order, case.num_tokens))
                base.append(self._time([], case.num_tokens))
            self._adapters.forget(cids)
            bases[case.num_tokens] = base[-1]
            times = (mean_of(base), mean_of(lora))
            rows.append(case_row(case, row_of(*times, self._limit, self._num_layers)))
            print_row(rows[-1])
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


def cases_up_to(max_tokens: int, cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.num_tokens <= max_tokens]


def case_row(case: Case, row: dict[str, object]) -> dict[str, object]:
    kept = ("base step ms", "LoRA step ms", "LoRA / base", LORA_US, GRAPH_US)
    return {
        "tokens": case.num_tokens,
        "sites": case.sites,
        "adapters": case.num_adapters,
        **{name: row[name] for name in kept},
        "goal us": case.goal_us,
    }


def grid_section(rows: Table, limit: Roofline) -> Section:
    x = [f"{r['batch']} tokens, {r['adapters']} x r{r['rank']} {r['sites']}" for r in rows]
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


def cases_section(rows: Table, kernels: Table) -> Section:
    """Make the table of the cases; `kernels` has the rows of gpu_lora.run_cases, or none."""
    joined: Table = []
    for number, row in enumerate(rows):
        kernel = kernels[number] if kernels else {}
        own = {
            "ours, kernels alone": kernel.get("alone"),
            "ours, kernels added": kernel.get("added"),
        }
        known = {"tokens", "sites", "adapters", "floor", "goal", "base", "alone", "added"}
        peers = {name: value for name, value in kernel.items() if name not in known}
        joined.append({**row, **(own if kernels else {}), **peers})
    shown = [LORA_US, GRAPH_US, "goal us"]
    if kernels:
        shown += [n for n in joined[0] if n.endswith(" added") and n != "ours, kernels added"]
    panel = Panel(
        title="LoRA overhead per decoder layer",
        x_label="tokens, sites, adapters",
        y_label="microseconds",
        x=[f"{row['tokens']} {row['sites']} {row['adapters']}" for row in rows],
        series={name: column(joined, name) for name in shown},
    )
    note = (
        "Engine: (step with LoRA - base step) / layers, in us, the base timed before and after "
        "each case. Peers: their kernels in a CUDA graph."
    )
    return Section(
        title="LoRA in nine batches, rank 16", rows=joined, notes=(note,), panels=(panel,)
    )


def print_row(row: dict[str, object]) -> None:
    cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  " + ", ".join(cells), flush=True)


def generate_section(work: GenerateWork, peer: float, own: float) -> Section:
    rows: Table = [
        {"system": "transformers generate", "tok/s": peer, "ratio": 1.0},
        {"system": "loramux", "tok/s": own, "ratio": own / peer},
    ]
    panel = Panel(
        title=f"{work.batch} requests, {work.num_input} in / {work.num_output} out",
        x_label="system",
        y_label="output tokens/s",
        x=[str(row["system"]) for row in rows],
        series={"tok/s": [peer, own]},
    )
    title = f"Throughput: {work.batch} x {work.num_input} in / {work.num_output} out"
    return Section(title=title, rows=rows, panels=(panel,))


def time_peers(folder: Path) -> Table:
    """Time our kernels and the peers' kernels on the nine cases; needs a GPU."""
    from benchmarks.lib import gpu_lora

    return gpu_lora.run_cases(gpu_lora.import_peers(folder))


def free_memory() -> None:
    """Collect reference cycles, so that the GPU memory of a closed engine is released."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    arguments = parse_arguments(make_parser())
    fill_defaults(arguments)
    out = start_report("step", arguments, describe_machine(arguments.dtype, arguments.device))
    batch, num_input, num_output = arguments.generate
    work = GenerateWork(batch=batch, num_input=num_input, num_output=num_output)
    peer = 0.0
    if arguments.transformers:
        dtype = dtype_of(arguments)
        peer = time_transformers(shape_of(arguments), work, device=arguments.device, dtype=dtype)
    bench = StepBench(arguments, out)
    if arguments.transformers:
        out.add(generate_section(work, peer, time_engine(bench.engine, work)))
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
