"""Combined adapters that requests name: made once each, on first use, and kept on disk."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loramux.adapters.combine.cache import CombinationCache
from loramux.adapters.recipe import Recipe
from loramux.backend.host import AdapterHost
from loramux.base.threads import FOLDER_READS
from loramux.errors import AdapterNotFound, AdapterRefused, EngineBusy, InvalidRequest, LoramuxError
from loramux.registry.records import RecipePart, Resolved, VersionRecipe
from loramux.server.naming.names import AdapterNames, NamedAdapter, full_name
from loramux.types.adapter import AdapterCard

MAKER = "loramux.adapters.combine.maker"
MAX_CONCURRENT = 2
MAX_WAITING = 64
MAX_MAKE_S = 900.0
MAX_REFUSALS = 1024

Make = Callable[[Recipe, Mapping[str, str]], Awaitable[Path]]
"""Makes a combination from the folders of its parts by CID, and returns its folder."""

Restore = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class MadeCombination:
    recipe: Recipe
    card: AdapterCard


class Combinations:
    """Makes combinations and adds them to the host. It belongs to one event loop."""

    def __init__(
        self,
        host: AdapterHost,
        cache: CombinationCache,
        *,
        restore: Restore | None = None,
        make: Make | None = None,
    ) -> None:
        """`restore` makes the files of a part readable again that are gone."""
        self._host = host
        self._restore = restore
        self._cache = cache
        self._make = make or partial(make_in_child, cache.root)
        self._made: dict[str, MadeCombination] = {}
        self._recipes: dict[str, Recipe] = {}
        self._refusals: dict[str, AdapterRefused] = {}
        self._tasks: dict[str, asyncio.Task[MadeCombination]] = {}
        self._running = asyncio.Semaphore(MAX_CONCURRENT)

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes of the combinations that requests have named, by CID of the adapter."""
        return self._recipes

    def is_ready(self, recipe: Recipe) -> bool:
        """Return whether the host has the combination's adapter."""
        made = self._made.get(recipe.cid)
        return made is not None and made.card.cid in self._host.adapters

    async def add(self, recipe: Recipe) -> AdapterCard:
        """Return the combination's adapter, which the host has afterwards.

        It is made once for all concurrent callers. Raises AdapterRefused if the parts cannot be
        combined, and EngineBusy if too many combinations wait.
        """
        refusal = self._refusals.get(recipe.cid)
        if refusal is not None:
            raise AdapterRefused(refusal.code, refusal.reason, fix=refusal.fix)
        made = self._made.get(recipe.cid)
        if made is not None and self.is_ready(recipe) and self._cache.touch(recipe):
            return made.card
        task = self._tasks.get(recipe.cid)
        if task is None:
            if len(self._tasks) >= MAX_WAITING:
                raise EngineBusy(f"{MAX_WAITING} combinations of adapters wait to be made.")
            task = self._tasks[recipe.cid] = asyncio.create_task(self._add(recipe))
            task.add_done_callback(lambda done: self._done(recipe, done))
        # A caller that is cancelled must not cancel the others.
        return (await asyncio.shield(task)).card

    async def _add(self, recipe: Recipe) -> MadeCombination:
        folder = await FOLDER_READS.run(self._cache.find, recipe)
        if folder is None:
            parts = {part.cid: await self._folder_of(part.cid) for part in recipe.parts}
            async with self._running:
                folder = await self._make(recipe, parts)
            await self._remove_trimmed(await FOLDER_READS.run(self._cache.trim, folder))
        made = MadeCombination(recipe, await self._host.add_adapter(str(folder)))
        self._made[recipe.cid] = made
        self._recipes[made.card.cid] = recipe
        return made

    async def _folder_of(self, cid: str) -> str:
        card = self._host.adapters.get(cid)
        if card is not None and self._restore is not None and not Path(card.path).is_dir():
            await self._restore(cid)
            card = self._host.adapters.get(cid)
        if card is None:
            raise AdapterNotFound(f"{cid} was removed while a combination with it was made.")
        return card.path

    async def _remove_trimmed(self, folders: list[Path]) -> None:
        """Remove adapters from the host whose folders are gone; their requests finish."""
        removed = {str(folder) for folder in folders}
        for key, made in list(self._made.items()):
            if made.card.path in removed:
                del self._made[key]
                self._recipes.pop(made.card.cid, None)
                if made.card.cid in self._host.adapters:
                    await self._host.remove_adapter(made.card.cid)

    def _done(self, recipe: Recipe, task: asyncio.Task[MadeCombination]) -> None:
        del self._tasks[recipe.cid]
        # Reading the exception also keeps asyncio from reporting it as never retrieved.
        error = None if task.cancelled() else task.exception()
        # The same parts are refused again, unless a file was replaced meanwhile.
        if isinstance(error, AdapterRefused) and error.code != "changed_on_disk":
            self._refusals[recipe.cid] = error
            while len(self._refusals) > MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]


async def make_in_child(root: Path, recipe: Recipe, folders: Mapping[str, str]) -> Path:
    """Make a combination in a child process, so that it slows down neither server nor engine."""
    task = {"root": str(root), "recipe": recipe.encode().decode(), "folders": dict(folders)}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MAKER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(MAX_MAKE_S):
            output, errors = await child.communicate(json.dumps(task).encode())
    except TimeoutError as error:
        raise LoramuxError(f"A combination took longer than {MAX_MAKE_S:.0f} s.") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _read_answer(output, errors)


def _read_answer(output: bytes, errors: bytes) -> Path:
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise LoramuxError(
            f"The combination of adapters failed: {lines[-1][:500] if lines else 'no answer'}."
        ) from error
    if "refused" in answer:
        refused = answer["refused"]
        raise AdapterRefused(refused["code"], refused["reason"], fix=refused["fix"])
    if "failed" in answer:
        raise LoramuxError(f"The combination of adapters failed: {answer['failed']}")
    return Path(answer["folder"])


async def open_version(
    names: AdapterNames, combinations: Combinations | None, resolved: Resolved, text: str
) -> tuple[NamedAdapter, ...]:
    """Return the adapters of a version, which the host has afterwards.

    It is one adapter, except for a sum, whose parts are returned with their weights. `text` is the
    name in the request.
    """
    recipe = resolved.recipe
    if recipe is None:
        await names.pull(resolved)
        return (NamedAdapter(text, resolved.cid, resolved=resolved),)
    if recipe.is_sum:
        await _pull_all(names, map(_resolved_part, recipe.parts))
        names.add_sum(resolved)
        return tuple(
            NamedAdapter(
                f"{part} of {full_name(resolved)}",
                part.cid,
                resolved=_resolved_part(part),
                weight=part.weight,
                part_of=resolved,
            )
            for part in recipe.parts
        )
    return (await _open_combination(names, combinations, resolved, text),)


async def _open_combination(
    names: AdapterNames, combinations: Combinations | None, resolved: Resolved, text: str
) -> NamedAdapter:
    stored = resolved.recipe
    assert stored is not None, "the version is a recipe"
    if combinations is None:
        raise InvalidRequest(
            f"{full_name(resolved)} is a recipe by {stored.recipe.method.name}, and this server "
            "makes no combinations.",
            param="model",
        )
    if not combinations.is_ready(stored.recipe):
        await _pull_all(names, map(_resolved_part, stored.parts))
    try:
        card = await combinations.add(stored.recipe)
    except AdapterRefused as error:
        reason = f"{full_name(resolved)}: {_with_names(error.reason, stored)}"
        raise AdapterRefused(error.code, reason, fix=error.fix) from error
    combined = NamedAdapter(text, card.cid, resolved=resolved, recipe=stored.recipe)
    names.add_combination(combined)
    return combined


def _with_names(reason: str, recipe: VersionRecipe) -> str:
    for part in recipe.parts:
        reason = reason.replace(part.cid, str(part))
    return reason


def _resolved_part(part: RecipePart) -> Resolved:
    if part.adapter is None:
        return Resolved(cid=part.cid)
    return Resolved(
        cid=part.cid, tenant=part.adapter.tenant, name=part.adapter.name, version=part.version
    )


async def _pull_all(names: AdapterNames, parts: Iterable[Resolved]) -> None:
    """Pull all parts at once; raise the first failure after all have ended."""
    results = await asyncio.gather(*map(names.pull, parts), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
