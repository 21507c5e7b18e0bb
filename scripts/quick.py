"""Checks what a change touches: lint of its files, and the tests nearest to them by imports.

    python scripts/quick.py [--since REVISION] [--seconds 60]

Changed files are those of the working tree and of the commits since REVISION (default: the branch
`main`, or its upstream). Tests run in the order of their distance from the change, and those that
do not begin in time are counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from import_graph import ROOT, distances, import_graph, module_of

MAX_DISTANCE = 3
MAX_TEST_FILES = 40
# Files that are no Python modules -> the tests that read them.
TESTS_OF = {
    "docs/": ("tests/unit/test_docs.py",),
    "README.md": ("tests/unit/test_readme.py",),
    "deploy/": ("tests/unit/test_kubernetes.py", "tests/unit/test_container.py"),
    "scripts/": ("tests/unit/scripts",),
    "pyproject.toml": ("tests/unit/test_imports.py",),
}


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none if it fails."""
    told = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.splitlines() if told.returncode == 0 else []


def changed_files(since: str | None) -> list[Path]:
    """Return the files that differ from the common ancestor with `since`, and untracked ones."""
    base = next(
        (
            found[0]
            for one in (since, "main", "@{upstream}")
            if one and (found := git("merge-base", "HEAD", one))
        ),
        "HEAD",
    )
    names = {
        *git("diff", "--name-only", base),
        *git("ls-files", "--others", "--exclude-standard"),
    }
    return [path for name in sorted(names) if (path := ROOT / name).is_file()]


def nearest_tests(changed: Sequence[Path]) -> list[str]:
    """Return the files of tests that import a changed module, the nearest first."""
    modules = frozenset(module_of(path) for path in changed if path.suffix == ".py")
    found = distances(import_graph(), modules)
    near = sorted(
        (distance, name)
        for name, distance in found.items()
        if name.startswith("tests.unit.") and name.rpartition(".")[2].startswith("test_")
    )
    # Of the tests that reach a change, those of its own package are the first.
    packages = {".".join(name.split(".")[1:2]) for name in modules if name.startswith("loramux.")}
    near.sort(key=lambda one: (one[0], one[1].split(".")[2] not in packages, one[1]))
    tests = [name.replace(".", "/") + ".py" for distance, name in near if distance <= MAX_DISTANCE]
    for path in changed:
        relative = path.relative_to(ROOT).as_posix()
        tests += [
            test for start, some in TESTS_OF.items() if relative.startswith(start) for test in some
        ]
    return [test for test in dict.fromkeys(tests) if (ROOT / test).exists()]


def run(what: str, *command: str, environment: dict[str, str] | None = None) -> bool:
    print(f"==> {what}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    changed = changed_files(options.since)
    sources = [str(path.relative_to(ROOT)) for path in changed if path.suffix == ".py"]
    tests = nearest_tests(changed)
    print(f"{len(changed)} files have changed; {len(tests)} files of tests reach them")
    python = sys.executable
    is_right = True
    if sources:
        is_right &= run("ruff format", python, "-m", "ruff", "format", "--check", "-q", *sources)
        is_right &= run("ruff check", python, "-m", "ruff", "check", "-q", *sources)
        is_right &= run("language", python, "scripts/check_language.py", *sources)
    is_right &= run("structure", python, "scripts/check_structure.py")
    chosen, left = tests[:MAX_TEST_FILES], tests[MAX_TEST_FILES:]
    if chosen:
        environment = {**os.environ, "LORAMUX_TEST_DEADLINE": str(deadline)}
        flags = ("-q", "-x", "--timeout=60", "-m", "not slow", "-p", "no:cacheprovider")
        is_right &= run(
            f"tests of {len(chosen)} files",
            *(python, "-m", "pytest", *flags, *chosen),
            environment=environment,
        )
    if left:
        print(f"{len(left)} more files of tests reach the change: run `make test`")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
