"""Makes combined adapters on demand, each once, in a process of low priority.

`python -m loramux.adapters.combine.maker` reads a task as JSON from its input and writes the result
as JSON to its output, so that a server can make a combination without torch in its own process.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.combine.cache import CombinationCache
from loramux.adapters.combine.combine import combine, write_combined
from loramux.adapters.peft.reader import CheckedAdapter
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.peft.writer import new_folder
from loramux.adapters.recipe import Recipe, decode_recipe
from loramux.base.private_files import PRIVATE_FILE, make_private_folder
from loramux.errors import AdapterRefused, LoramuxError, Refusal

CHANGED = "changed_on_disk"
NICENESS = 10


class CombinationMaker:
    """Makes the combinations of a cache; any thread of any process may call it."""

    def __init__(self, cache: CombinationCache) -> None:
        self._cache = cache

    def make(self, recipe: Recipe, folders: Mapping[str, Path], *, any_base: bool = True) -> Path:
        """Return the folder of a combination, which is made if it is not there.

        `folders`: the folder of each part, by CID. Raises AdapterRefused if the parts cannot be
        combined, or if a folder no longer holds its part. Of concurrent calls with one recipe, in
        any processes, one makes it and the others wait.
        """
        with self._locked(recipe):
            found = self._cache.find(recipe)
            if found is not None:
                return found
            parts = {part.cid: _read_part(part.cid, folders[part.cid]) for part in recipe.parts}
            combined = combine(recipe, parts, any_base=any_base)
            with new_folder(self._cache.path(recipe)) as staging:
                write_combined(staging, combined)
        return self._cache.path(recipe)

    @contextmanager
    def _locked(self, recipe: Recipe) -> Iterator[None]:
        """Hold the lock of a sixteenth of all recipes, so that the files of locks stay few."""
        make_private_folder(self._cache.root)
        path = self._cache.root / f".lock-{self._cache.path(recipe).name[0]}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_part(cid: str, folder: Path) -> CheckedAdapter:
    adapter = read_without_base(folder)
    if adapter.cid != cid:
        raise AdapterRefused(
            CHANGED,
            f"{folder} no longer holds {cid} but {adapter.cid}: its files were replaced.",
            fix="Send the request again to use the new files.",
        )
    return adapter


def main() -> None:
    os.nice(NICENESS)
    task = json.load(sys.stdin)
    maker = CombinationMaker(CombinationCache(Path(task["root"]), budget_bytes=0))
    folders = {cid: Path(path) for cid, path in task["folders"].items()}
    answer: dict[str, object]
    try:
        made = maker.make(decode_recipe(task["recipe"]), folders)
    except Refusal as error:
        answer = {"refused": {"code": str(error.code), "reason": error.reason, "fix": error.fix}}
    except (LoramuxError, OSError) as error:
        answer = {"failed": str(error)}
    else:
        answer = {"folder": str(made)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
