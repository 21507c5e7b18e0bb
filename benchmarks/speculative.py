"""Measure tokens per second with and without drafts of prompt lookup.

    python -m benchmarks.speculative [--model FOLDER] [--streams 1 8 32] [--rounds 3] [--json FILE]

Two workloads: `copy` asks for the text of the prompt with small changes (an edit of code, a repair
of JSON, a quote), `hostile` samples at temperature 1 after random tokens, which repeats nothing.
The engines with and without drafts take turns, and their answers are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loramux import LLM, SamplingParams

LOOKUP = '{"method": "ngram"}'
ITEMS = ("lamp", "chair", "table", "shelf", "clock", "vase", "mirror", "carpet", "stool", "desk")


def copy_prompts(count: int) -> list[str]:
    """Prompts whose answers repeat long runs of them."""
    prompts = []
    for number in range(count):
        draw = random.Random(number)
        rows = [
            f'{{"id": {i}, "name": "{draw.choice(ITEMS)}", "price": {draw.randint(5, 99)}}}'
            for i in range(10)
        ]
        text = "[\n  " + ",\n  ".join(rows) + "\n]"
        prompts.append(
            f"Here is a list as JSON:\n\n{text}\n\nThe same list once more, unchanged:\n\n[\n  "
        )
    return prompts


def hostile_prompts(count: int, llm: LLM) -> list[str]:
    """Prompts of random tokens."""
    prompts = []
    for number in range(count):
        draw = random.Random(number)
        token_ids = [draw.randrange(3, llm.engine.vocab_size) for _ in range(128)]
        prompts.append(llm.tokenizer.decode(token_ids))
    return prompts


def measure(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> tuple[float, list[Any]]:
    """Return tokens per second of a batch of these prompts, and the answers."""
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, answers)) / seconds, answers


def compare(
    plain: LLM, drafted: LLM, prompts: Sequence[str], params: SamplingParams, rounds: int
) -> dict[str, float]:
    """Measure both in turns, after one round that is not counted."""
    speeds: tuple[list[float], list[float]] = ([], [])
    num_equal = 0
    for number in range(rounds + 1):
        found = [measure(llm, prompts, params) for llm in (plain, drafted)]
        num_equal = sum(one == other for one, other in zip(found[0][1], found[1][1], strict=True))
        if number:
            for kept, (speed, _) in zip(speeds, found, strict=True):
                kept.append(speed)
    before, after = map(statistics.median, speeds)
    return {
        "plain_tokens_s": round(before, 1),
        "drafted_tokens_s": round(after, 1),
        "ratio": round(after / before, 3),
        "equal_answers": num_equal / len(prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: the demo model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculative-config", default=LOOKUP)
    parser.add_argument("--device-memory", type=int, default=2 * 2**30, help="bytes of each pool")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    memory = args.device_memory
    plain = LLM(args.model, device_memory_bytes=memory)
    drafted = LLM(
        args.model, device_memory_bytes=memory, speculative_config=args.speculative_config
    )
    report: dict[str, dict[str, float]] = {}
    for streams in args.streams:
        workloads = {
            "copy": (copy_prompts(streams), 0.0),
            "hostile": (hostile_prompts(streams, plain), 1.0),
        }
        for name, (prompts, temperature) in workloads.items():
            params = SamplingParams(
                temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True
            )
            drafts = drafted.engine.scheduler.drafts
            assert drafts is not None
            verified, accepted = drafts.num_drafts[""], drafts.num_accepted[""]
            found = compare(plain, drafted, prompts, params, args.rounds)
            verified = drafts.num_drafts[""] - verified
            accepted = drafts.num_accepted[""] - accepted
            found["acceptance"] = round(accepted / verified, 3) if verified else 0.0
            report[f"{name} {streams}"] = found
            print(f"{name:8} {streams:3} streams: {found}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
