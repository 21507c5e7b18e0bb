"""The structure that the import contract cannot express."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "loramux"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TRITON_FUNCTION_LINES = 120
TWIN_SUFFIXES = ("_torch", "_cpu", "_triton")

FOLDERS = ("loramux", "tests", "benchmarks", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGE_SOURCES = [path for path in SOURCES if path.is_relative_to(PACKAGE)]
TESTED_SOURCES = [path for path in PACKAGE_SOURCES if path.name != "__init__.py"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_triton_twin(path: Path) -> bool:
    return path.parent == PACKAGE / "kernels" and path.stem.endswith("_triton")


def imported_names(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def uses_torch_cuda(tree: ast.AST) -> bool:
    reached = any(
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )
    return reached or any(name.startswith("torch.cuda") for name in imported_names(tree))


def mirrored_tests(path: Path) -> list[Path]:
    """Where the tests of a source file may stand: kernel twins share one file."""
    folder = ROOT / "tests" / "unit" / path.relative_to(PACKAGE).parent
    stems = [path.stem]
    stems += [path.stem.removesuffix(end) for end in TWIN_SUFFIXES if path.stem.endswith(end)]
    return [folder / f"test_{stem}.py" for stem in stems]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    limit = MAX_TRITON_FUNCTION_LINES if is_triton_twin(path) else MAX_FUNCTION_LINES
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    too_long = {
        node.name: lines
        for node in functions
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    }
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not too_long, f"functions over {limit} lines"


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=relative)
def test_torch_cuda_is_called_in_one_place(path: Path) -> None:
    if path != PACKAGE / "memory" / "device.py":
        assert not uses_torch_cuda(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=relative)
def test_triton_stays_in_the_fast_twins(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    assert "triton" not in roots or is_triton_twin(path)


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=relative)
def test_only_the_top_package_has_an_init_with_code(path: Path) -> None:
    if path.name == "__init__.py" and path.parent != PACKAGE:
        assert not path.read_text().strip()


@pytest.mark.parametrize("path", TESTED_SOURCES, ids=relative)
def test_every_source_file_has_its_test_file(path: Path) -> None:
    places = mirrored_tests(path)
    assert any(place.exists() for place in places), f"none of {[relative(p) for p in places]}"
