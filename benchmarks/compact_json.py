"""Count the JSON answers that reach max_tokens, and those that whitespace keeps from their end.

    python -m benchmarks.compact_json [--schemas 500] [--whitespace compact] [--seed 0]

Random schemas, whose values are bounded, are asked of the demo model and its adapters at
temperatures 0 and 1. max_tokens is twice the tokens of the longest compact value. Each
answer that ends with `length` is asked again without any whitespace: if that one ends, whitespace
was the cause.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux import LLM, LoRARequest, SamplingParams
from loramux.types.grammar import Grammar, Whitespace

ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
TEMPERATURES = (0.0, 1.0)
NAMES = [
    "name",
    "city",
    "kind",
    "size",
    "color",
    "count",
    "level",
    "is_open",
    "rating",
    "state",
    "unit",
    "day",
    "notes",
    "owner",
]
WORDS = [
    "small",
    "large",
    "red",
    "green",
    "Rome",
    "Paris",
    "open",
    "closed",
    "daily",
    "never",
    "high",
    "low",
    "unknown",
    "other",
]
QUESTIONS = ("Rome?", "Describe a shop.", "Is it open?", "Report the weather.", "A red box.")


def random_schema(draw: random.Random, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """Return a schema and its longest value."""
    kinds = ["enum", "enum", "boolean", "integer", "const"]
    kind = "object" if depth == 0 else draw.choice(kinds + ["array", "object"] * (depth < 3))
    match kind:
        case "object":
            names = draw.sample(NAMES, draw.randint(1, 5))
            inner = {name: random_schema(draw, depth + 1) for name in names}
            required = [name for name in names if draw.random() < 0.8]
            schema = {
                "type": "object",
                "properties": {name: one for name, (one, _) in inner.items()},
                "required": required,
                "additionalProperties": False,
            }
            return schema, {name: value for name, (_, value) in inner.items()}
        case "array":
            schema, value = random_schema(draw, depth + 1)
            most = draw.randint(1, 3)
            return {"type": "array", "items": schema, "maxItems": most}, [value] * most
        case "enum":
            words = draw.sample(WORDS, draw.randint(2, 5))
            return {"enum": words}, max(words, key=len)
        case "boolean":
            return {"type": "boolean"}, False
        case "integer":
            most = 10 ** draw.randint(1, 4) - 1
            return {"type": "integer", "minimum": 0, "maximum": most}, most
    word = draw.choice(WORDS)
    return {"const": word}, word


class Asker:
    def __init__(self, llm: LLM, cases: Sequence[tuple[dict[str, Any], Any]], seed: int) -> None:
        self._llm = llm
        self._cases = cases
        self._seed = seed

    def num_tokens(self, number: int) -> int:
        """Tokens of the longest compact value."""
        text = json.dumps(self._cases[number][1], separators=(",", ":"))
        return len(self._llm.tokenizer.encode(text, add_special_tokens=False))

    def ended(
        self,
        numbers: Sequence[int],
        lora: LoRARequest | None,
        temperature: float,
        whitespace: Whitespace,
    ) -> list[bool]:
        """Return whether the answer to each schema ends before max_tokens."""
        params = [
            SamplingParams(
                temperature=temperature,
                seed=self._seed + number,
                max_tokens=2 * self.num_tokens(number),
                grammar=Grammar.of_schema(self._cases[number][0], whitespace=whitespace).encode(),
            )
            for number in numbers
        ]
        messages = [
            [
                {"role": "system", "content": "Answer."},
                {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]},
            ]
            for number in numbers
        ]
        outputs = self._llm.chat(messages, params, lora_request=lora, use_tqdm=False)
        return [output.outputs[0].finish_reason == "stop" for output in outputs]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--whitespace", choices=["compact", "any", "none"], default="compact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=128)
    options = parse_arguments(parser, words)
    draw = random.Random(options.seed)
    llm = LLM()
    out = start_report("compact-json", options, describe_machine("float32"))
    asker = Asker(llm, [random_schema(draw) for _ in range(options.schemas)], options.seed)
    adapters = [
        LoRARequest(path.name, number, str(path))
        for number, path in enumerate(sorted(ADAPTERS.iterdir()), 1)
        if path.is_dir()
    ]
    rows: Table = []
    total: Counter[str] = Counter()
    for lora in [None, *adapters]:
        for temperature in TEMPERATURES:
            count = _counted(asker, options, lora, temperature)
            name = "base" if lora is None else lora.lora_name
            rows.append({"model": name, "temperature": temperature, **_shares(count)})
            print(rows[-1], flush=True)
            total += count
    rows.append({"model": "all", **_shares(total)})
    out.add(Section(title="Answers that end with length", rows=rows))
    out.finish()


def _counted(
    asker: Asker, options: argparse.Namespace, lora: LoRARequest | None, temperature: float
) -> Counter[str]:
    count = Counter(answers=options.schemas)
    for start in range(0, options.schemas, options.batch):
        numbers = range(start, min(start + options.batch, options.schemas))
        ended = asker.ended(numbers, lora, temperature, options.whitespace)
        cut = [number for number, is_whole in zip(numbers, ended, strict=True) if not is_whole]
        count["length"] += len(cut)
        if cut:
            count["whitespace"] += sum(asker.ended(cut, lora, temperature, "none"))
    return count


def _shares(count: Counter[str]) -> dict[str, object]:
    return {
        "answers": count["answers"],
        "end with length": count["length"],
        "%": 100 * count["length"] / count["answers"],
        "for whitespace": count["whitespace"],
    }


if __name__ == "__main__":
    main()
