"""Fails where the code leaves the structure that the import contract cannot express.

python scripts/check_structure.py
python scripts/check_structure.py --report    # counts of modules, rooms, arrows and floors
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from structure_report import report

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "loramux"
FOLDERS = ("loramux", "tests", "benchmarks", "examples", "scripts")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PACKAGE_DOCSTRING_LINES = 5
# The only modules that may import each of these.
HOMES = {
    "triton": (PACKAGE / "kernels" / "gpu",),
    "numba": (PACKAGE / "kernels" / "cpu_jit",),
    "torch.cuda": (PACKAGE / "memory" / "device.py", PACKAGE / "memory" / "gpus.py"),
}


def size_faults(path: Path, text: str, tree: ast.AST) -> Iterator[str]:
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                where = f"{path}:{node.lineno}: {node.name}"
                yield f"{where} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def import_faults(path: Path, tree: ast.AST) -> Iterator[str]:
    names = set(_imported_names(tree))
    for module, homes in HOMES.items():
        used = any(name == module or name.startswith(f"{module}.") for name in names)
        if used and not any(path.is_relative_to(home) for home in homes):
            yield f"{path}: imports {module}, which belongs in {homes[0].relative_to(ROOT)}"


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module or ''}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                yield "torch.cuda"


def init_faults(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield what is wrong with a package's `__init__.py`: a short docstring, and nothing else."""
    if path.name != "__init__.py" or path.parent == PACKAGE:
        return
    docstring = ast.get_docstring(tree)
    if docstring is None:
        yield f"{path}: needs a docstring: what it is, what enters, leaves and may not be imported"
    elif len(docstring.splitlines()) > MAX_PACKAGE_DOCSTRING_LINES:
        yield f"{path}: the docstring has over {MAX_PACKAGE_DOCSTRING_LINES} lines"
    if len(tree.body) > (docstring is not None):
        yield f"{path}: only the top package's __init__.py has code"


def main(arguments: list[str]) -> int:
    if arguments == ["--report"]:
        print("\n".join(report()))
        return 0
    found: list[str] = []
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        found += size_faults(path, text, tree)
        if path.is_relative_to(PACKAGE):
            found += [*import_faults(path, tree), *init_faults(path, tree)]
    print("\n".join([*found, f"{len(found)} findings"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
