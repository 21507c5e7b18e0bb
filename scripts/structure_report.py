"""Counts of the package's structure, for comparison before and after a change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from import_graph import ROOT, Graph, import_graph

PACKAGE = ROOT / "loramux"
ROOMS_OF = "loramux.server"
# Names of classes that are an adapter in one of its forms, such as ImageAdapterCard.
ADAPTER_NAME = re.compile(
    r"(Adapter|Lora|LoRA)(Body|Card|Contents|Entry|Image|Info|Module|Record|Report|Request)?$"
)


def report() -> Iterator[str]:
    """Yield a line for each count."""
    graph = import_graph("loramux")
    files = sorted(PACKAGE.rglob("*.py"))
    modules = [path for path in files if path.name != "__init__.py"]
    yield f"modules: {len(modules)}, of them in the root: {_num_flat(PACKAGE)}"
    yield f"packages: {len(files) - len(modules)}"
    server = ROOT.joinpath(*ROOMS_OF.split("."))
    inside = [path for path in modules if path.is_relative_to(server)]
    yield f"{ROOMS_OF}: {len(inside)} files, {_num_flat(server)} of them flat"
    rooms = [path for path in server.iterdir() if (path / "__init__.py").exists()]
    arrows = _arrows(graph, ROOMS_OF)
    num_arrows = sum(map(len, arrows.values()))
    upward = sum(_reaches(arrows, to, room) for room, found in arrows.items() for to in found)
    yield f"{ROOMS_OF}: {len(rooms)} rooms, {num_arrows} arrows, {upward} of them in a cycle"
    yield f"{ROOMS_OF}: {_num_floors(graph, ROOMS_OF)} floors of modules"
    names = sorted(_adapter_names(modules))
    yield f"classes that mean an adapter: {len(names)}: {', '.join(names)}"


def _num_flat(folder: Path) -> int:
    return sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def _arrows(graph: Graph, package: str) -> dict[str, set[str]]:
    """Return room -> rooms that it imports; a flat module is a room."""
    found: dict[str, set[str]] = {}
    for name, imported in graph.items():
        room = _room(name, package)
        if room is not None:
            others = {_room(one, package) for one in imported} - {room, None}
            found.setdefault(room, set()).update(one for one in others if one is not None)
    return found


def _room(module: str, package: str) -> str | None:
    return module.removeprefix(f"{package}.").split(".")[0] if f"{package}." in module else None


def _reaches(arrows: Mapping[str, set[str]], start: str, goal: str) -> bool:
    seen, waiting = {start}, [start]
    while waiting:
        found = arrows.get(waiting.pop(), set()) - seen
        seen |= found
        waiting += found
    return goal in seen


def _num_floors(graph: Graph, package: str) -> int:
    """Return the length of the longest chain of imports within a package."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 0
            inside = [one for one in graph[name] if one.startswith(f"{package}.")]
            heights[name] = 1 + max(map(height, inside), default=0)
        return heights[name]

    return max(height(name) for name in graph if name.startswith(f"{package}."))


def _adapter_names(modules: list[Path]) -> Iterator[str]:
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and ADAPTER_NAME.search(node.name):
                yield node.name
