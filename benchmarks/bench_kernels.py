"""Kernels by themselves: LoRA beside other servers' kernels, attention beside torch's.

    python -m benchmarks.bench_kernels [--peers FOLDER] [--parts lora,attention]

LoRA is in microseconds per decoder layer, rank 16, one decode step: "alone", and "added" to the
products of the base. On a GPU, shapes of Llama-3.1-8B in a CUDA graph, each kernel checked against
its torch twin first; FOLDER holds the peers' packages (see benchmarks/gpu_lora_kernels.py). On a
CPU, shapes of SmolLM2, beside the plain torch reference.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import cpu_lora_kernels
from benchmarks.bench_report import (
    Panel,
    Section,
    add_output_options,
    draw,
    names,
    peers_folder,
    start_report,
)
from benchmarks.machine import describe_machine
from benchmarks.report import Table


def lora_section(rows: Table, title: str) -> Section:
    facts = ("rows", "sites", "adapters", "base")
    shown = [name for name in rows[0] if name not in facts]
    series = {
        name: [float(v) if isinstance(v := row.get(name), int | float) else None for row in rows]
        for name in shown
    }
    panel = Panel(
        title=title,
        x_label="rows, sites, adapters",
        y_label="microseconds per layer",
        x=[f"{row['rows']} {row['sites']} {row['adapters']}" for row in rows],
        series=series,
    )
    return Section(title=title, rows=rows, panels=(panel,))


def gpu_lora(arguments: argparse.Namespace) -> Section:
    from benchmarks import gpu_lora_kernels as kernels

    if arguments.checks:
        checks = kernels.check(kernels.checked_launches())
        worst = max(float(row["error"]) for row in checks)
        print(f"{len(checks)} checks passed; largest relative error {worst:.1e}", flush=True)
    peers = kernels.import_peers(arguments.peers) if arguments.peers else None
    return lora_section(kernels.run_cases(peers), "LoRA per decoder layer, rank 16, decode, us")


def attention_section(rows: Table, title: str, name: str, shares: list[str]) -> Section:
    series: dict[str, list[float | None]] = {
        share: [float(str(row[share])) for row in rows] for share in shares
    }
    x = [str(row[name]) for row in rows]
    panel = Panel(title=title, x_label=name, y_label="share", x=x, series=series)
    return Section(title=title, rows=rows, panels=(panel,))


def gpu_attention() -> list[Section]:
    from benchmarks import gpu_attention as attention

    prompts, decodes = attention.prompt_rows(), attention.decode_rows()
    share = list(decodes[0])[-1]
    return [
        attention_section(prompts, "Attention, prompts", "prompt", ["of flash's speed"]),
        attention_section(decodes, "Attention, decode", "decode", [share]),
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--parts", type=names(("lora", "attention")), default=["lora", "attention"])
    parser.add_argument("--peers", type=peers_folder, metavar="FOLDER")
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    add_output_options(parser)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    if arguments.plot_from is not None:
        draw(arguments.plot_from)
        return
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    out = start_report("kernels", arguments, describe_machine(dtype, arguments.device))
    if arguments.device == "cpu":
        title = "LoRA per decoder layer, rank 16, decode, us (CPU, SmolLM2's shapes)"
        out.add(lora_section(cpu_lora_kernels.run_cases(), title))
    else:
        if "lora" in arguments.parts:
            out.add(gpu_lora(arguments))
        if "attention" in arguments.parts:
            for section in gpu_attention():
                out.add(section)
    out.finish()


if __name__ == "__main__":
    main()
