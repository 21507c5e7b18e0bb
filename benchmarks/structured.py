"""Measure tokens/s of a batch with none, half and all of its rows constrained by a grammar.

    python -m benchmarks.structured [--batch 32] [--tokens 128] [--rounds 5] [--adapters 4]

Weights and tokenizer are random, with the shapes of SmolLM2 on a CPU and of Llama-3.1-8B on a GPU.
The schema's strings are long, so that every row generates all of its tokens. Rounds alternate, and
each figure is the median; the first round is not counted. "masks us" is the time in which the masks
of one step are computed, of which a GPU hides what is shorter than the forward pass; "compile ms"
is the time until a schema of 24 fields is compiled, the median of several schemas.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_tokenizer import END, write_tokenizer
from benchmarks.lib.random_weights import (
    RandomAdapters,
    add_engine_options,
    dtype_of,
    is_gpu,
    make_engine,
    shape_of,
)
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.engine.engine import Engine
from loramux.types.grammar import Grammar
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams
from loramux.types.step import SampleRow

NAMES = ("summary", "details", "notes")
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 900} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
FREE = "/ unconstrained"
COMPILE = "compile ms"


def schema_of_24_fields(number: int) -> dict[str, Any]:
    """Return a schema with patterns, formats, enums, numbers and lists; each number another one."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "email"},
        {"type": "string", "minLength": 1, "maxLength": 80},
        {"enum": ["red", "green", "blue", f"other {number}"]},
        {"type": "integer", "minimum": 0, "maximum": 100_000 + number},
        {"type": "number", "minimum": -1.5, "maximum": 99.5},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 10},
    ]
    fields = {f"field_{number}_{i}": kinds[i % len(kinds)] for i in range(24)}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


class MaskTimer:
    """Sums the time that an engine takes to fill masks."""

    def __init__(self, constraints: Any) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self._fill = constraints.fill
        constraints.fill = self.fill

    def fill(self, rows: Iterable[SampleRow]) -> None:
        began = time.perf_counter()
        self._fill(rows)
        self.seconds += time.perf_counter() - began
        self.num_steps += 1

    def take_us(self) -> float:
        """Return the mean of a step in microseconds, and start again."""
        mean = 1e6 * self.seconds / max(1, self.num_steps)
        self.seconds, self.num_steps = 0.0, 0
        return mean


def rate_of(
    engine: Engine, args: argparse.Namespace, num_constrained: int, selections: Sequence[Selection]
) -> float:
    """Return the tokens/s of one batch; constrained rows are spread over the adapters."""
    grammar = Grammar.of_schema(SCHEMA).encode()
    num_tokens = 0
    began = time.perf_counter()
    for row in range(args.batch):
        is_held = row * num_constrained % args.batch < num_constrained
        params = SamplingParams(
            temperature=1.0, max_tokens=args.tokens, grammar=grammar if is_held else None
        )
        prompt = tuple(range(101 + row, 117 + row))
        selection = selections[row % len(selections)]
        engine.add(
            Request(
                request_id=f"{row}",
                prompt_token_ids=prompt,
                params=params,
                selection=selection,
                seed=row,
            )
        )
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            num_tokens += event.token_id is not None
    seconds = time.perf_counter() - began
    assert num_tokens == args.batch * args.tokens, "a row ended before its last token"
    return num_tokens / seconds


def measure(engine: Engine, args: argparse.Namespace, selections: Sequence[Selection]) -> Table:
    timer = MaskTimer(engine.constraints)
    cases = {"none": 0, "half": args.batch // 2, "all": args.batch}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    masks: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.rounds + 1):
        for name, num_constrained in cases.items():
            rate = rate_of(engine, args, num_constrained, selections)
            mask_us = timer.take_us()
            if number > 0:  # the first round compiles
                rates[name].append(rate)
                masks[name].append(mask_us)
    # Neighbours in time are compared: the clock of a machine drifts.
    free = rates["none"]
    return [
        {
            "constrained": name,
            "rows": f"{cases[name]} of {args.batch}",
            "tok/s": statistics.median(rates[name]),
            FREE: statistics.median(a / b for a, b in zip(rates[name], free, strict=True)),
            "masks us": statistics.median(masks[name]),
        }
        for name in cases
    ]


def compile_times(engine: Engine, count: int = 9) -> Table:
    times = []
    for number in range(count + 1):
        text = Grammar.of_schema(schema_of_24_fields(number)).encode()
        began = time.perf_counter()
        engine.constraints.start(text).result()
        times.append(1e3 * (time.perf_counter() - began))
    # The first one reads the tokenizer.
    return [
        {"schema": "24 fields", COMPILE: statistics.median(times[1:]), "slowest": max(times[1:])}
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench structured", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, default=4, help="beside the base")
    add_engine_options(parser)
    return parser


def main() -> None:
    args = parse_arguments(make_parser())
    args.model = args.model or ("llama-3.1-8b" if is_gpu(args) else "smollm2-135m")
    out = start_report("structured", args, describe_machine(str(dtype_of(args)), args.device))
    with tempfile.TemporaryDirectory() as name:
        tokenizer = write_tokenizer(Path(name), shape_of(args)["vocab_size"])
        _, engine = make_engine(args)
        engine.constraints.use_tokenizer(tokenizer, (END,))
        cids = RandomAdapters(engine).add([16] * args.adapters, "all")
        selections: list[Selection] = [(), *(((cid, 1.0),) for cid in cids)]
        out.add(Section(title="Compiling", rows=compile_times(engine)))
        rows = measure(engine, args, selections)
        title = f"Constrained rows, {args.model}, {args.adapters} adapters"
        out.add(Section(title=title, rows=rows))
        engine.close()
    out.finish()


if __name__ == "__main__":
    main()
