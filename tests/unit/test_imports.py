"""What an import of loramux needs, and what it must not drag in; each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Hides every installed package but the engine's own dependencies (and what those require).
# typer and rich are hidden too, although transformers' own command line requires them.
HIDE_THE_REST = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENGINE = "torch transformers tokenizers safetensors numpy msgspec gguf".split()

def required(name, seen):
    name = canonicalize_name(name)
    if name in seen:
        return seen
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return seen
    seen.add(name)
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required(requirement.name, seen)
    return seen

allowed = set()
for name in ENGINE:
    required(name, allowed)
allowed -= {"typer", "rich"}
allowed |= {"loramux", "triton"}
hidden = {
    module for module, owners in packages_distributions().items()
    if not any(canonicalize_name(owner) in allowed for owner in owners)
}

class Hiding:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""

ALL_THAT_A_BARE_GPU_MACHINE_RUNS = """
import importlib, importlib.util, pkgutil, loramux

EXTRAS = (
    "cli client compose deploy diffusion http_server image_launch launch metrics receipts "
    "registry router server sources specs store"
).split()
COMPILERS = {"gpu": "triton", "cpu_jit": "numba"}
for module in pkgutil.walk_packages(loramux.__path__, "loramux."):
    parts = module.name.split(".")
    if parts[1] in EXTRAS:
        continue
    compiler = COMPILERS.get(parts[2]) if parts[1] == "kernels" and len(parts) > 2 else None
    if compiler is not None and importlib.util.find_spec(compiler) is None:
        continue
    importlib.import_module(module.name)
from loramux import LLM, LoRARequest, SamplingParams
"""

LIGHT_MODULES = """
import importlib, pkgutil, sys
import loramux, loramux.scheduler
from loramux import LoRARequest, SamplingParams

names = ["loramux.errors", "loramux.cli.main"]
for package in ("types", "config", "scheduler", "store", "capacity"):
    paths = importlib.import_module(f"loramux.{package}").__path__
    names += [module.name for module in pkgutil.walk_packages(paths, f"loramux.{package}.")]
for name in names:
    importlib.import_module(name)
assert "torch" not in sys.modules, "torch was imported"
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )


def test_engine_imports_with_its_own_dependencies_alone() -> None:
    result = run_python(HIDE_THE_REST + ALL_THAT_A_BARE_GPU_MACHINE_RUNS)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["typer", "rich", "peft", "hypothesis", "pytest"])
def test_the_hiding_really_hides(package: str) -> None:
    result = run_python(f"{HIDE_THE_REST}\nimport {package}")
    assert "ModuleNotFoundError" in result.stderr


def test_light_modules_and_command_line_start_without_torch() -> None:
    result = run_python(LIGHT_MODULES)
    assert result.returncode == 0, result.stderr


def test_an_import_leaves_the_environment_as_it_is() -> None:
    program = "import os; before = dict(os.environ); import loramux, loramux.cli.main"
    result = run_python(f"{program}; assert dict(os.environ) == before")
    assert result.returncode == 0, result.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    import loramux

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = loramux.no_such_name
