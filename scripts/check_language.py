"""Fails on retired words in identifiers, docstrings and comments, and on docstring fragments.

    python scripts/check_language.py [PATH ...]

The project uses the terms of the field; docs/GLOSSARY.md lists the few that are its own. The words
here have no legitimate use in this code base, so that every finding is a real one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("loramux", "tests", "benchmarks", "examples", "scripts")

# Parts of identifiers (snake_case and CamelCase are split), with what to write instead.
IDENTIFIER_WORDS = {
    "debtor": "the counter with the largest lead",
    "desk": "registry or table",
    "doubt": "the condition that is checked",
    "flying": "in_flight",
    "keeper": "supervisor or tracker",
    "lane": "queue (scheduler) or thread (kernel)",
    "lanes": "queues (scheduler) or threads (kernel)",
    "ledger": "counters",
    "lengthen": "unpack",
    "multiprocessors": "sms",
    "patience": "timeout",
    "product": "gemm",
    "products": "gemms",
    "shorten": "pack",
    "tail": "augmented",
    "tails": "augmented",
    "tenure": "time in the batch",
    "twin": "reference",
    "twins": "reference",
    "whom": "the object's name",
}
IDENTIFIER_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
# Names of libraries that contain a retired word.
ALLOWED_NAMES = {"product", "twinx", "twiny"}

TEXT_PATTERNS = {
    r"\bwhoever\b": "name the object",
    r"\bnobody\b": "name the object",
    r"\bsomebody\b": "name the object",
    r"\bwhom\b": "name the object",
    r"\bis no number\b|\bno number\b": "NaN",
    r"\bmatrix units?\b": "tensor core",
    r"\bmultiprocessors?\b": "SM",
    r"\btwins?\b": "reference implementation",
    r"\bproducts? in parts\b|\bsum of parts\b": "split-K",
    r"\bproducts? of few rows\b": "small-M GEMM",
    r"\bfrom the tail\b|\bin the tail\b": "augmented weights",
    r"\bfrom lists\b": "segmented path",
    r"\bon a hot card\b|\bhot card\b": "power-limited GPU",
    r"\blanes first\b": "MMA fragment layout",
}
TEXT_WORDS = {re.compile(pattern, re.IGNORECASE): fix for pattern, fix in TEXT_PATTERNS.items()}
FRAGMENTS = ("Of ",)


def identifier_faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield retired words in the names that this file defines."""
    for node in ast.walk(tree):
        for name in _defined(node):
            if name in ALLOWED_NAMES:
                continue
            for part in IDENTIFIER_PARTS.findall(name):
                fix = IDENTIFIER_WORDS.get(part.lower())
                if fix is not None:
                    yield node.lineno, f"{name}: instead of '{part}' write {fix}"


def _defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


def text_faults(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield retired words in docstrings and comments, and docstrings that are fragments."""
    for line, text in [*_docstrings(tree), *_comments(source)]:
        for pattern, fix in TEXT_WORDS.items():
            found = pattern.search(text)
            if found is not None:
                yield line, f"'{found.group()}': write {fix}"
    for line, text in _docstrings(tree):
        if text.startswith(FRAGMENTS):
            yield line, f"docstring is a fragment: {text.splitlines()[0][:60]!r}"


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults_of(path: Path) -> list[str]:
    source = path.read_text()
    tree = ast.parse(source)
    found = sorted({*identifier_faults(tree), *text_faults(source, tree)})
    return [f"{path}:{line}: {fault}" for line, fault in found]


def main(arguments: list[str]) -> int:
    places = [Path(argument) for argument in arguments] or [ROOT / name for name in FOLDERS]
    paths = [
        p for place in places for p in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
    ]
    own = Path(__file__).resolve()
    found = [fault for path in paths if path.resolve() != own for fault in faults_of(path)]
    print("\n".join([*found, f"{len(found)} findings in {len(paths)} files"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
