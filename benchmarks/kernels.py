"""Time the kernels alone: LoRA beside other servers' kernels, attention beside torch's.

    python -m benchmarks.kernels [--peers FOLDER] [--parts lora,attention]

LoRA times are microseconds per decoder layer in one decode step of rank 16: "alone", and "added" to
the GEMMs of the base. A GPU runs the shapes of Llama-3.1-8B in a CUDA graph after comparing the
kernels with their torch reference; benchmarks/lib/gpu_lora.py describes the peers' FOLDER. A CPU
runs the shapes of SmolLM2 beside the torch reference.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.lib import cpu_kernels
from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import (
    Panel,
    Section,
    Table,
    column,
    names,
    parse_arguments,
    peers_folder,
    start_report,
)


def lora_section(rows: Table, title: str) -> Section:
    facts = ("tokens", "sites", "adapters", "base")
    panel = Panel(
        title=title,
        x_label="tokens, sites, adapters",
        y_label="microseconds per layer",
        x=[f"{row['tokens']} {row['sites']} {row['adapters']}" for row in rows],
        series={name: column(rows, name) for name in rows[0] if name not in facts},
    )
    return Section(title=title, rows=rows, panels=(panel,))


def gpu_lora(arguments: argparse.Namespace) -> list[Section]:
    from benchmarks.lib import gpu_lora as kernels

    if arguments.checks:
        checks = kernels.check(kernels.checked_launches())
        worst = max(float(row["error"]) for row in checks)
        print(f"{len(checks)} checks passed; largest relative error {worst:.1e}", flush=True)
    peers = kernels.import_peers(arguments.peers) if arguments.peers else None
    title = "LoRA per decoder layer, rank 16, decode, us"
    return [
        lora_section(kernels.run_cases(peers), title),
        lora_section(kernels.run_sums(), f"{title}: adapters in the sum of each token"),
    ]


def attention_section(rows: Table, title: str, name: str, share: str) -> Section:
    panel = Panel(
        title=title,
        x_label=name,
        y_label="share",
        x=[str(row[name]) for row in rows],
        series={share: column(rows, share)},
    )
    return Section(title=title, rows=rows, panels=(panel,))


def gpu_attention() -> list[Section]:
    from benchmarks.lib import gpu_attention as attention

    prefills, decodes = attention.prefill_rows(), attention.decode_rows()
    share = list(decodes[0])[-1]
    return [
        attention_section(prefills, "Attention, prefill", "prompt", "of flash's speed"),
        attention_section(decodes, "Attention, decode", "decode", share),
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
    return parser


def main() -> None:
    arguments = parse_arguments(make_parser())
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    out = start_report("kernels", arguments, describe_machine(dtype, arguments.device))
    if arguments.device == "cpu":
        title = "LoRA per decoder layer, rank 16, decode, us (CPU, SmolLM2's shapes)"
        out.add(lora_section(cpu_kernels.run_cases(), title))
    else:
        if "lora" in arguments.parts:
            for section in gpu_lora(arguments):
                out.add(section)
        if "attention" in arguments.parts:
            for section in gpu_attention():
                out.add(section)
    out.finish()


if __name__ == "__main__":
    main()
