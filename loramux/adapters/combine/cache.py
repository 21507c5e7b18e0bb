"""The folder of combined adapters that were made on demand, within a byte budget.

This module imports no torch: the server looks combinations up here, and a child process makes them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from loramux.adapters.identity import parse_cid
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, read_head, read_metadata
from loramux.adapters.recipe import Recipe, find_recipe
from loramux.errors import LoramuxError


class CombinationCache:
    """Keeps one PEFT folder for each recipe, named by the digest of the recipe.

    A folder appears complete or not at all. Its modification time is the time of its last use.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.root = root
        self._budget_bytes = budget_bytes

    def path(self, recipe: Recipe) -> Path:
        return self.root / parse_cid(recipe.cid)

    def find(self, recipe: Recipe) -> Path | None:
        """Return the folder of a combination, marked as used; None if it is not there.

        A folder that holds another recipe is removed.
        """
        folder = self.path(recipe)
        if not folder.is_dir():
            return None
        if _recorded_recipe(folder) != recipe:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(folder)
        return folder

    def touch(self, recipe: Recipe) -> bool:
        """Mark a combination as used; return False if it is not there."""
        try:
            os.utime(self.path(recipe))
        except FileNotFoundError:
            return False
        return True

    def trim(self, kept: Path) -> list[Path]:
        """Remove the folders that were not used for longest, until the budget holds.

        `kept` stays. Returns the removed folders.
        """
        found = [(path.stat().st_mtime_ns, path) for path in self.root.iterdir() if _is_one(path)]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for _, path in found}
        used, removed = sum(sizes.values()), []
        for _, path in sorted(found):
            if used <= self._budget_bytes:
                break
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
                used -= sizes[path]
                removed.append(path)
        return removed


def _is_one(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _recorded_recipe(folder: Path) -> Recipe | None:
    try:
        with (folder / WEIGHTS_NAME).open("rb") as file:
            return find_recipe(read_metadata(read_head(file, os.fstat(file.fileno()).st_size)))
    except (OSError, LoramuxError):
        return None
