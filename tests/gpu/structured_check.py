"""Compare constrained answers of a GPU engine with the reference, and with their schemas.

    python -m tests.gpu.structured_check [--parts small,large,timing]

small   float32: answers of a mixed batch (JSON schemas, regular expressions, a Lark grammar, lists
        of tokens, free rows; base, adapters and sums) equal those of the torch reference on the
        same device, and those that each request gets alone
large   bfloat16, shapes of Llama-3.1-8B: every finished answer follows its schema
timing  what masks add to a decode step of the large model, by the host's clock

The second half of the requests also has rows of the full sampler, with which steps cannot run
ahead. Weights and tokenizers are random. Needs llguidance and jsonschema. On a CPU it checks the
CPU's path.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import torch

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.random_tokenizer import END, decoder_of, write_tokenizer
from benchmarks.lib.report import Section, Table, names, parse_arguments, start_report
from loramux.engine.engine import Engine
from loramux.types.composition import compose
from loramux.types.grammar import Grammar
from loramux.types.request import FinishReason, Request, Selection
from loramux.types.sampling import SamplingParams
from tests.gpu.engine_check import (
    LARGE,
    SMALL,
    WEIGHTS,
    Scale,
    random_engine,
    write_adapters,
)
from tests.grammar_factory import random_schema

DIFFER = "answers that differ"
INVALID = "invalid answers"
LARK = 'start: item ("," item)*\nitem: NAME "=" /[0-9]{1,3}/\nNAME: /[a-z]{1,5}/'
REGEXES = ("[a-z]{4} (one|two)", "([0-9]{2}:){2}[0-9]{2}", "(yes|no|[A-Z]{2,6})")


@dataclass(frozen=True)
class Case:
    """A request, and the check of its finished answer."""

    request: Request
    check: Callable[[str], bool]


@dataclass
class Answer:
    token_ids: list[int]
    is_finished: bool = False
    error: str | None = None


def fits_schema(schema: object) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return check


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def anything(text: str) -> bool:
    return True


def constraint_of(chance: random.Random) -> tuple[dict[str, Any], Callable[[str], bool]]:
    """Return parameters of sampling that constrain an answer, and its check."""
    kind = chance.random()
    if kind < 0.6:
        schema = random_schema(chance)
        return {"grammar": Grammar.of_schema(schema).encode()}, fits_schema(schema)
    if kind < 0.8:
        pattern = chance.choice(REGEXES)
        return {"grammar": Grammar("regex", pattern).encode()}, matches(pattern)
    if kind < 0.9:
        item = "[a-z]{1,5}=[0-9]{1,3}"
        return {"grammar": Grammar("lark", LARK).encode()}, matches(f"{item}(,{item})*")
    allowed = tuple(sorted(chance.sample(range(1, 257), 20)))
    return {"allowed_token_ids": allowed, "min_tokens": 3}, anything


def make_cases(cids: Sequence[str], count: int, num_tokens: int, seed: int) -> list[Case]:
    """Make requests of which half are constrained, on the base, an adapter or a sum."""
    chance = random.Random(seed)
    cases = []
    for number in range(count):
        chosen = chance.sample(list(cids), min(len(cids), chance.choice((0, 1, 1, 2))))
        weights = [1.0] if len(chosen) == 1 else [chance.choice(WEIGHTS) for _ in chosen]
        selection: Selection = compose(zip(chosen, weights, strict=True))
        settings: dict[str, Any] = {"temperature": chance.choice((0.0, 0.0, 1.0))}
        check = anything
        # Steps with a row of the full sampler cannot run ahead: the first half has none.
        if number >= count // 2 and number % 16 in (5, 10, 12):
            settings |= {"temperature": 1.0, "top_p": 0.9} if number % 16 < 12 else {"logprobs": 2}
        if number % 2:
            constraint, check = constraint_of(chance)
            settings |= constraint
        prompt = tuple(chance.randrange(1, 1024) for _ in range(chance.randint(1, 80)))
        params = SamplingParams(max_tokens=num_tokens, seed=number, **settings)
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            params=params,
            selection=selection,
            seed=number,
            eos_token_ids=(END,),
        )
        cases.append(Case(request, check))
    return cases


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    answers = {one.request_id: Answer([]) for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            answer = answers[event.request_id]
            answer.error = answer.error or event.error
            if event.token_id is not None:
                answer.token_ids.append(event.token_id)
            answer.is_finished = answer.is_finished or event.finish_reason is FinishReason.STOP
    engine.check_integrity()
    return answers


def make_engine(
    tokenizer: Path, adapters: Sequence[Path], dtype: str, scale: Scale, *, reference: bool = False
) -> Engine:
    engine = random_engine(adapters, dtype, reference=reference, scale=scale)
    engine.constraints.use_tokenizer(tokenizer, (END,))
    return engine


def cids_of(engine: Engine) -> list[str]:
    return [known.cid for known in engine.catalog.known()]


def judge(
    name: str, cases: Sequence[Case], answers: dict[str, Answer], folder: Path
) -> dict[str, Any]:
    texts = decoder_of(folder)
    invalid, finished, errors = [], 0, []
    for case in cases:
        answer = answers[case.request.request_id]
        if answer.error is not None:
            errors.append((case.request.request_id, answer.error))
        if not answer.is_finished:
            continue
        finished += 1
        text = b"".join(texts[token] for token in answer.token_ids).decode(errors="replace")
        if not case.check(text):
            invalid.append((case.request.request_id, text, case.request.params.grammar))
    for one in [*invalid, *errors][:5]:
        print(f"  {name}: {one}", flush=True)
    constrained = sum(case.request.params.is_constrained for case in cases)
    return {
        "engine": name,
        "requests": len(cases),
        "constrained": constrained,
        "finished": finished,
        INVALID: len(invalid),
        "errors": len(errors),
    }


def num_differing(name: str, expected: dict[str, Answer], found: dict[str, Answer]) -> int:
    differing = [one for one in expected if expected[one] != found[one]]
    for one in differing[:5]:
        pairs = zip(expected[one].token_ids, found[one].token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        print(f"  {name}, {one}: token {first} of {len(expected[one].token_ids)}", flush=True)
    return len(differing)


def check_small(folder: Path, scale: Scale, count: int, num_tokens: int) -> Section:
    tokenizer = write_tokenizer(folder / "tokenizer", scale.shape["vocab_size"])
    adapters = write_adapters(folder / "adapters", scale)
    reference = make_engine(tokenizer, adapters, "float32", scale, reference=True)
    cases = make_cases(cids_of(reference), count, num_tokens, seed=0)
    requests = [case.request for case in cases]
    expected = run(reference, requests)
    reference.close()
    rows: Table = [{**judge("reference", cases, expected, tokenizer), DIFFER: 0}]
    engine = make_engine(tokenizer, adapters, "float32", scale)
    for name in ("mixed batch", "mixed batch, all graphs"):
        began = time.perf_counter()
        found = run(engine, requests)
        differ = num_differing(name, expected, found)
        seconds = time.perf_counter() - began
        rows.append({**judge(name, cases, found, tokenizer), DIFFER: differ, "s": seconds})
        engine.prepare_all()
    some = requests[:24]
    alone = {one.request_id: run(engine, [one])[one.request_id] for one in some}
    differ = num_differing("alone", {name: expected[name] for name in alone}, alone)
    rows.append({**judge("alone", cases[:24], alone, tokenizer), DIFFER: differ})
    engine.close()
    note = "Answers in float32 against the torch reference on the same device."
    return Section(title="Mixed batches of a small model", rows=rows, notes=(note,))


def check_large(folder: Path, scale: Scale, count: int, num_tokens: int) -> Section:
    tokenizer = write_tokenizer(folder / "tokenizer", scale.shape["vocab_size"])
    adapters = write_adapters(folder / "adapters", scale)
    engine = make_engine(tokenizer, adapters, "bfloat16", scale)
    rows: Table = []
    for number in range(2):
        cases = make_cases(cids_of(engine), count, num_tokens, seed=number)
        began = time.perf_counter()
        found = run(engine, [case.request for case in cases])
        row = judge(f"round {number}", cases, found, tokenizer)
        rows.append({**row, "s": time.perf_counter() - began})
    engine.close()
    return Section(title="Mixed batches, shapes of Llama-3.1-8B, bfloat16", rows=rows)


def check_timing(folder: Path, scale: Scale, num_rows: int) -> Section:
    """Time steps of free rows, of half and of all rows constrained; rounds alternate."""
    tokenizer = write_tokenizer(folder / "tokenizer", scale.shape["vocab_size"])
    engine = make_engine(tokenizer, [], "bfloat16", scale)
    engine.prepare_all()
    string = {"type": "string", "minLength": 2000}
    grammar = Grammar.of_schema({"type": "array", "items": string}).encode()
    times: dict[int, list[float]] = {0: [], num_rows // 2: [], num_rows: []}
    for number in range(4):
        for num_constrained, seconds in times.items():
            for row in range(num_rows):
                text = grammar if row < num_constrained else None
                params = SamplingParams(max_tokens=100, temperature=1.0, grammar=text)
                prompt = tuple(range(1 + row, 17 + row))
                engine.add(Request(request_id=f"{row}", prompt_token_ids=prompt, params=params))
            steps = []
            while engine.has_work:
                began = time.perf_counter()
                engine.step()
                steps.append(time.perf_counter() - began)
            if number:
                seconds.append(statistics.median(steps[10:-5]))
    engine.close()
    base = statistics.median(times[0])
    rows: Table = [
        {
            "constrained": f"{num_constrained} of {num_rows}",
            "step ms": 1e3 * statistics.median(seconds),
            "speed of free rows": base / statistics.median(seconds),
        }
        for num_constrained, seconds in times.items()
    ]
    return Section(title="Decode steps with masks", rows=rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = ("small", "large", "timing")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--parts", type=names(parts), default=list(parts))
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of an answer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    return parser


def main() -> int:
    arguments = parse_arguments(make_parser())
    device = arguments.device
    out = start_report("structured", arguments, describe_machine("float32, bfloat16", device))
    print(f"llguidance {llguidance.__version__}", flush=True)
    work: dict[str, Callable[[Path], Section]] = {
        "small": lambda folder: check_small(
            folder, replace(SMALL, device=device), arguments.requests, arguments.tokens
        ),
        "large": lambda folder: check_large(
            folder, replace(LARGE, device=device), arguments.requests // 2, arguments.tokens
        ),
        "timing": lambda folder: check_timing(folder, replace(LARGE, device=device), 32),
    }
    failed: Table = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as name:
            section = work[part](Path(name))
        out.add(section)
        wrong = (DIFFER, INVALID, "errors")
        failed += [row for row in section.rows if any(row.get(column) for column in wrong)]
        failed += [row for row in section.rows if row.get("finished") == 0]
    out.finish()
    for row in failed:
        print(f"WRONG: {row}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
