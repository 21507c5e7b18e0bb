"""The JSON Schema test suite against the grammars of structured output.

    python -m tests.schema_suite [SDIST]

prints the figures of docs/structured-output.md. The suite is part of the source distribution of
`jsonschema`, which pip downloads unless a file is named.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from loramux.engine.grammar.checking import check_apart
from loramux.engine.grammar.library import Tables, tokenizer_json
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.fields import AskedConstraint, make_grammar
from tests.tokenizer_factory import save_byte_level

RELEASE = "jsonschema==4.26.0"
DRAFT = "json/tests/draft2020-12/"
MAX_ORDERS = 120
EOS = 2
REASONS = (
    ("unevaluated", "`unevaluatedProperties`, `unevaluatedItems`"),
    ("dependent", "`dependentSchemas`, `dependentRequired`"),
    ("ontains", "`contains`, `minContains`, `maxContains`"),
    (r'"(if|then|else)"', "`if`, `then`, `else`"),
    (r'"not"', "`not`"),
    (r"\$dynamic", "`$dynamicRef`, `$dynamicAnchor`"),
    ("propertyNames", "`propertyNames`"),
    ("uniqueItems", "`uniqueItems`"),
    ("^`oneOf`", "`oneOf` whose branches a value could follow together"),
    ("^Resource", "`$ref` to another document"),
    ("^Unsatisfiable", "no value is valid"),
    ("are not disjoint", "`patternProperties` that overlap"),
    ("multipleOf", "`multipleOf` with many digits"),
)
"""What an error says -> what the schema has."""


@dataclass(frozen=True, slots=True)
class Case:
    """One schema of the suite with its instances."""

    place: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]
    """(instance, whether it is valid)"""


@dataclass(slots=True)
class Figures:
    num_schemas: int = 0
    num_instances: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Schemas that are refused, by reason."""
    num_refused_instances: int = 0
    right: int = 0
    valid_rejected: list[str] = field(default_factory=list)
    """Valid instances that a grammar does not allow."""
    invalid_accepted: list[str] = field(default_factory=list)

    @property
    def share_refused(self) -> float:
        return self.refused.total() / self.num_schemas


def download(folder: Path) -> Path:
    """Download the source distribution that has the suite."""
    words = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), RELEASE]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, *words], check=True)
    return next(folder.glob("*.tar.gz"))


def read_cases(sdist: Path) -> Iterator[Case]:
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            name = member.name.partition(DRAFT)[2]
            if "/" in name or not name.endswith(".json"):
                continue
            content = archive.extractfile(member)
            assert content is not None
            for group in json.load(content):
                instances = tuple((test["data"], test["valid"]) for test in group["tests"])
                place = f"{name}: {group['description']}"
                yield Case(place, group["schema"], instances)


class Judge:
    """Tells whether the grammar of a schema allows an instance, by the tokens of its text."""

    def __init__(self, folder: Path) -> None:
        save_byte_level(folder)
        self._tokenizer = Tokenizer(folder)
        self._tables = Tables(
            tokenizer_json(folder), eos_token_ids=(EOS,), vocab_size=self._tokenizer.vocab_size
        )

    def compile(self, schema: Any) -> Any:
        """Compiles a schema as a request does; raises ValueError or InvalidRequest."""
        grammar = make_grammar(AskedConstraint("json", schema, "schema"))
        check_apart(grammar)
        return self._tables.compile(grammar)

    def allows(self, matcher: Any, instance: Any) -> bool:
        """Whether any order of the properties is allowed: a grammar has one order."""
        return any(self._allows_text(matcher, text) for text in _texts(instance))

    def _allows_text(self, matcher: Any, text: str) -> bool:
        state = matcher.deep_copy()
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except InvalidRequest:  # half of a surrogate pair
            return False
        return bool(state.try_consume_tokens(token_ids) == len(token_ids) and state.is_accepting())


def _texts(instance: Any) -> set[str]:
    values = [instance]
    if isinstance(instance, dict):
        orders = islice(permutations(instance.items()), MAX_ORDERS)
        values = [dict(order) for order in orders]
    return {
        json.dumps(value, ensure_ascii=is_ascii) for value in values for is_ascii in (True, False)
    }


def reason_of(error: Exception) -> str:
    """Return what a refusal names; the first of REASONS if it names several."""
    text = str(error)
    found = next((told for pattern, told in REASONS if re.search(pattern, text)), None)
    return found or re.sub(r"\s+", " ", text)


def measure(sdist: Path, folder: Path) -> Figures:
    judge, found = Judge(folder), Figures()
    for case in read_cases(sdist):
        found.num_schemas += 1
        found.num_instances += len(case.instances)
        try:
            matcher = judge.compile(case.schema)
        except (InvalidRequest, ValueError) as error:
            found.refused[reason_of(error)] += 1
            found.num_refused_instances += len(case.instances)
            continue
        for instance, is_valid in case.instances:
            is_allowed = judge.allows(matcher, instance)
            told = f"{case.place}: {json.dumps(instance)}"
            if is_allowed == is_valid:
                found.right += 1
            elif is_valid:
                found.valid_rejected.append(told)
            else:
                found.invalid_accepted.append(told)
    return found


def table(found: Figures) -> str:
    """Return the figures as the documentation has them."""
    rows = [f"| {reason} | {count} |" for reason, count in found.refused.most_common()]
    share = f"{found.refused.total()} ({100 * found.share_refused:.0f}%)"
    return "\n".join(
        [
            "| JSON Schema test suite, draft 2020-12 | |",
            "|---|---|",
            f"| schemas, instances | {found.num_schemas}, {found.num_instances} |",
            f"| schemas refused | {share} |",
            f"| instances of the others | {found.num_instances - found.num_refused_instances} |",
            f"| judged as the suite says | {found.right} |",
            f"| valid ones that cannot be generated | {len(found.valid_rejected)} |",
            f"| invalid ones that can be generated | {len(found.invalid_accepted)} |",
            "",
            "| refused for | schemas |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist = Path(sys.argv[1]) if len(sys.argv) > 1 else download(folder)
        found = measure(sdist, folder / "tokenizer")
    print(table(found))
    for what, places in (
        ("valid, not allowed", found.valid_rejected),
        ("invalid, allowed", found.invalid_accepted),
    ):
        print(*(f"{what}: {place}" for place in places), sep="\n")


if __name__ == "__main__":
    main()
