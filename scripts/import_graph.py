"""The imports between the project's own modules, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("loramux", "tests", "benchmarks")
Graph = Mapping[str, frozenset[str]]


def module_of(path: Path) -> str:
    """Return the dotted name of a file; a package has that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(*folders: str) -> Graph:
    """Return module -> modules that it imports when it runs, without those for types alone."""
    paths = {
        module_of(path): path
        for folder in folders or FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    return {
        name: frozenset(_own(_imported(ast.parse(path.read_text()), name), paths)) - {name}
        for name, path in paths.items()
    }


def _own(names: Iterator[str], paths: Mapping[str, Path]) -> Iterator[str]:
    for name in names:
        if name in paths:
            yield name
        elif (parent := name.rpartition(".")[0]) in paths:
            # `from package.module import name`
            yield parent


def _imported(tree: ast.AST, module: str) -> Iterator[str]:
    for node in _running(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(source), names=names, level=0):
                yield from (f"{source}.{alias.name}" for alias in names)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without the blocks of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (child for one in node.orelse for child in _running(one))
            continue
        yield node
        yield from _running(node)


def distances(graph: Graph, changed: frozenset[str]) -> dict[str, int]:
    """Return module -> the number of imports between it and the nearest changed module."""
    importers: dict[str, set[str]] = {}
    for name, imported in graph.items():
        for one in imported:
            importers.setdefault(one, set()).add(name)
    found = dict.fromkeys(changed & graph.keys(), 0)
    layer = set(found)
    while layer:
        far = {one for name in layer for one in importers.get(name, ())} - found.keys()
        found |= dict.fromkeys(far, max(found.values()) + 1)
        layer = far
    return found
