"""The table of clients in the documentation says what the tests of the clients show, no more."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLIENTS = REPOSITORY / "tests" / "clients"
FEATURES = (
    *("text", "stream", "typed", "tools", "loop", "embeddings", "responses", "adapters"),
    *("errors", "images"),
)


def shown_by(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (client, feature) of the marks of a test file."""
    module = ast.parse(file.read_text())
    (client,) = (
        ast.literal_eval(line.value)
        for line in module.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "CLIENT"
    )
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    for test in (test for test in tests if test.name.startswith("test_")):
        marks = [
            call
            for decorator in test.decorator_list
            for call in ast.walk(decorator)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "shows"
        ]
        assert marks, f"{file.name}: {test.name} has no mark `shows`"
        for mark in marks:
            yield from ((client, ast.literal_eval(feature)) for feature in mark.args)


def versions() -> dict[str, str]:
    lists = "\n".join(path.read_text() for path in sorted(CLIENTS.glob("*/requirements.txt")))
    found = dict(re.findall(r"^([\w.-]+)==(\S+)$", lists, re.MULTILINE))
    # Several folders have OpenAI's client; this one tests it.
    found |= dict(
        re.findall(
            r"^(openai)==(\S+)$", (CLIENTS / "openai3/requirements.txt").read_text(), re.MULTILINE
        )
    )
    package = json.loads((CLIENTS / "node" / "package.json").read_text())["dependencies"]
    names = {"openai": "openai (Node)"}
    found |= {names.get(name, name): version for name, version in package.items()}
    return {name.replace("_", "-"): version for name, version in found.items()}


def test_the_table_of_clients_is_that_of_the_tests() -> None:
    shown = defaultdict(set)
    for file in sorted(CLIENTS.glob("*/test_*.py")):
        for client, feature in shown_by(file):
            assert feature in FEATURES, f"{file.name}: {feature}"
            shown[client].add(feature)
    pinned = versions()
    table = [f"| client | version | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 2) + "|"]
    for client in sorted(shown, key=str.lower):
        cells = ["yes" if feature in shown[client] else "" for feature in FEATURES]
        row = " | ".join([client, pinned[client.replace("_", "-")], *cells])
        table.append(f"| {row} |")
    text = (REPOSITORY / "docs" / "clients.md").read_text()
    documented = text.partition("<!-- clients -->\n")[2].partition("\n<!-- /clients -->")[0]
    assert documented == "\n".join(table), "\n" + "\n".join(table)
