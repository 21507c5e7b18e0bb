"""Tokens/s of a batch with some of its rows constrained by a grammar.

    python -m benchmarks.studies.grammar_cost [--batch 32] [--tokens 32] [--rounds 3]

The schema's strings are long, so that every row generates all of its tokens. Rounds alternate, and
each figure is the median. `mask µs` is the time of the masks of one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import parse_arguments, write_table
from loramux import LLM, SamplingParams
from loramux.types.grammar import Grammar
from loramux.types.step import SampleRow

SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "minLength": 400} for name in ("summary", "details", "notes")
    },
    "required": ["summary", "details", "notes"],
    "additionalProperties": False,
}


class MaskTimer:
    """Sums the time that an engine takes to fill masks."""

    def __init__(self, constraints: Any) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self._fill = constraints.fill
        constraints.fill = self.fill

    def fill(self, rows: Iterable[SampleRow | None]) -> None:
        began = time.perf_counter()
        self._fill(rows)
        self.seconds += time.perf_counter() - began
        self.num_steps += 1

    def take_us(self) -> float:
        """Return the mean of a step in microseconds, and start again."""
        mean = 1e6 * self.seconds / max(1, self.num_steps)
        self.seconds, self.num_steps = 0.0, 0
        return mean


def round_of(llm: LLM, args: argparse.Namespace, num_constrained: int) -> float:
    """Return the tokens/s of one batch."""
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=args.tokens, ignore_eos=True)
    grammar = Grammar.of_schema(SCHEMA).encode()
    held = SamplingParams(temperature=1.0, seed=1, max_tokens=args.tokens, grammar=grammar)
    sampling = [held if i < num_constrained else free for i in range(args.batch)]
    prompts = [[101 + i] * 16 for i in range(args.batch)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, object]]:
    timer = MaskTimer(llm.engine.constraints)
    cases = {"none": 0, "half": args.batch // 2, "all": args.batch}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    masks: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.rounds + 1):
        for name, num_constrained in cases.items():
            rate = round_of(llm, args, num_constrained)
            mask_us = timer.take_us()
            if number > 0:  # the first round compiles
                rates[name].append(rate)
                masks[name].append(mask_us)
    base = statistics.median(rates["none"])
    return [
        {
            "constrained": name,
            "rows": f"{cases[name]} of {args.batch}",
            "tok/s": round(statistics.median(rates[name]), 1),
            "of unconstrained": f"{statistics.median(rates[name]) / base:.1%}",
            "mask µs": round(statistics.median(masks[name]), 1),
        }
        for name in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parse_arguments(parser)

    llm = LLM(args.model, device=args.device, device_memory_bytes=2**29)
    machine = describe_machine(str(llm.engine.executor.dtype), args.device)
    write_table("grammar-cost", measure(llm, args), machine, args)


if __name__ == "__main__":
    main()
