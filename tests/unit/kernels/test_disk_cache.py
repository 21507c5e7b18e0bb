from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="no numba on this machine")

from numba.core import caching
from numba.core.dispatcher import Dispatcher

import loramux.kernels.cpu_jit
from loramux.kernels.cpu_jit.disk_cache import PATTERN, can_cache, stamp_of

FOLDER = Path(loramux.kernels.cpu_jit.__path__[0])
CALLEE = "from numba import njit\n@njit(cache=True)\ndef value():\n    return {}\n"
CALLER = """
from pathlib import Path
from numba import njit
from loramux.kernels.cpu_jit.disk_cache import can_cache
assert can_cache(Path(__file__).parent)
from callee import value

@njit("int64()", cache=True)
def double():
    return 2 * value()

print(double(), sum(double.stats.cache_hits.values()))
"""


def run_caller(folder: Path) -> tuple[int, int]:
    """Return the result, and the number of cache hits."""
    found = subprocess.run(
        [sys.executable, str(folder / "caller.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])},
        capture_output=True,
        text=True,
        check=True,
    )
    value, num_hits = found.stdout.split()
    return int(value), int(num_hits)


@pytest.mark.slow
def test_a_caller_is_recompiled_when_its_callee_has_changed(tmp_path: Path) -> None:
    """Catches a server that goes on with kernels of the version before it was upgraded."""
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(21))
    assert run_caller(tmp_path) == (42, 0)
    assert run_caller(tmp_path) == (42, 1)
    (tmp_path / "callee.py").write_text(CALLEE.format(50))
    assert run_caller(tmp_path) == (100, 0)


def test_caches_of_other_folders_are_unchanged(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("def f():\n    return 1\n")
    known = caching.CacheImpl._locator_classes
    functions: dict[str, object] = {}
    exec(compile(elsewhere.read_text(), str(elsewhere), "exec"), functions)
    impl = caching.CompileResultCacheImpl(functions["f"])
    assert type(impl.locator).__name__ != "FolderLocator"
    assert caching.CacheImpl._locator_classes is known


def test_without_numbas_locators_nothing_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A numba with another cache is slower to start, and never wrong."""
    monkeypatch.delattr(caching.CacheImpl, "_locator_classes")
    assert not can_cache(tmp_path)


def test_kernels_are_compiled_each_time_where_nothing_can_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose file system is read-only must still start."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert not can_cache(tmp_path)


def test_names_and_contents_count(tmp_path: Path) -> None:
    found = {stamp_of(tmp_path)}
    for name, text in [("a.py", "x"), ("a.py", "y"), ("b.py", ""), ("c.txt", "")]:
        (tmp_path / name).write_text(text)
        found.add(stamp_of(tmp_path))
    assert len(found) == 4


@pytest.mark.parametrize(
    "path",
    sorted(p for p in FOLDER.glob(PATTERN) if p.stem != "__init__"),
    ids=lambda path: path.stem,
)
def test_compiled_code_uses_nothing_of_files_outside_the_stamp(path: Path) -> None:
    others = {
        alias.asname or alias.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loramux")
        for alias in node.names
        if not (node.module or "").startswith("loramux.kernels.cpu_jit")
    }
    module = importlib.import_module(f"loramux.kernels.cpu_jit.{path.stem}")
    for function in vars(module).values():
        if isinstance(function, Dispatcher):
            assert not others & set(function.py_func.__code__.co_names), function
