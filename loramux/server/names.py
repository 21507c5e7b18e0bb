"""The names of adapters on this server; the engine knows adapters by CID only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from loramux.adapters.recipe import Recipe
from loramux.backend import AdapterHost
from loramux.errors import AdapterNotFound, InvalidRequest, StoreDamaged
from loramux.registry.records import Resolved
from loramux.server.registry_adapters import RegistryAdapters
from loramux.types.adapter import AdapterCard
from loramux.types.composition import compose, find_repeated
from loramux.types.request import Selection

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GivenName:
    """A name that was given by --lora-modules or by vLLM's load call."""

    name: str
    cid: str
    path: str
    created_s: int


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that a request names, with its weight."""

    text: str
    """The name as in the request."""
    cid: str
    given: str | None = None
    """The given name; None: an adapter of the registry."""
    resolved: Resolved | None = None
    """What the registry resolved the name to; None: a given name."""
    weight: float = 1.0
    recipe: Recipe | None = None
    """The recipe of a combination; None: an adapter by itself."""
    parts: tuple[NamedAdapter, ...] = ()
    """The adapters of a combination, in the order of the request."""

    @property
    def label(self) -> str:
        """The adapter's label in shares and metrics, without its version."""
        if self.recipe is not None:
            return combination_label(self.recipe, self.parts)
        if self.resolved is not None:
            return label_of(self.resolved)
        return self.cid if self.given is None else self.given

    @property
    def full_name(self) -> str:
        return self.text if self.resolved is None else full_name(self.resolved)


@dataclass(frozen=True, slots=True)
class Selected:
    """The adapters that a request selects; none: the base."""

    model: str
    """The name that the answer shows: as in the request, or the base's first name."""
    adapters: tuple[NamedAdapter, ...] = ()
    """In the order of the request, each once."""

    @property
    def used(self) -> tuple[NamedAdapter, ...]:
        """The adapters that change the answer: those whose weight is not 0."""
        return tuple(adapter for adapter in self.adapters if adapter.weight != 0)

    @property
    def selection(self) -> Selection:
        return compose((adapter.cid, adapter.weight) for adapter in self.adapters)


class AdapterNames:
    """Maps names to CIDs: names that were given, and names of the registry once requested.

    An adapter is removed from the host when its last given name goes, unless requests have named
    it through the registry. The table belongs to one event loop.
    """

    def __init__(self, host: AdapterHost, registry: RegistryAdapters | None = None) -> None:
        self.registry = registry
        self._host = host
        self._given: dict[str, GivenName] = {}
        # CID -> its given names, in order.
        self._names: dict[str, dict[str, None]] = {}
        # CIDs from the registry -> the labels by which requests have named them.
        self._labels: dict[str, dict[str, None]] = {}
        # CIDs from the registry -> the full name of the last request.
        self._full_names: dict[str, str] = {}
        # CIDs of combinations -> their label.
        self._combined: dict[str, str] = {}
        self._pulling: dict[str, asyncio.Task[None]] = {}
        # An adapter without names stays while the host adds any: it may be the same adapter.
        self._num_adding = 0
        self._unnamed: set[str] = set()

    def find(self, name: str) -> GivenName | None:
        """Returns a given name, or None if there is none or the host has lost its adapter."""
        given = self._given.get(name)
        if given is None or given.cid in self._host.adapters:
            return given
        # A host that restarts registers the folder again, whose files may have changed.
        for card in self._host.adapters.values():
            if card.path == given.path:
                return self._put(replace(given, cid=card.cid))
        return None

    def given(self) -> list[GivenName]:
        """Returns all given names in the order in which they were added."""
        return [found for name in list(self._given) if (found := self.find(name)) is not None]

    def names_of(self, cid: str) -> list[str]:
        """Returns the given names of an adapter, and its last full name in the registry."""
        names = list(self._names.get(cid, ()))
        return [*names, self._full_names.get(cid, cid)] if cid in self._labels else names

    def labels_of(self, cid: str) -> list[str]:
        """Returns the labels of an adapter in metrics: given names, and registry names without
        their version."""
        labels = [*self._names.get(cid, ()), *self._labels.get(cid, ())]
        return [*labels, self._combined[cid]] if cid in self._combined else labels

    def add_combination(self, combined: NamedAdapter) -> None:
        """Records the label of a combination for metrics."""
        self._combined[combined.cid] = combined.label

    async def load(self, name: str, path: str) -> AdapterCard:
        """Adds the folder's adapter to the host, and gives it the name; raises AdapterRefused."""
        async with self._adding():
            card = await self._host.add_adapter(path)
            before = self._given.get(name)
            self.bind(name, card)
            if before is not None:
                self._unnamed.add(before.cid)
        return card

    def bind(self, name: str, card: AdapterCard, *, created_s: int | None = None) -> None:
        """Gives a name to an adapter that the host has."""
        created_s = int(time.time()) if created_s is None else created_s
        self._put(GivenName(name, card.cid, card.path, created_s))

    async def unload(self, name: str) -> None:
        given = self._given.pop(name, None)
        if given is None:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")
        self._unlink(given)
        self._unnamed.add(given.cid)
        await self._remove_unnamed()

    async def pull(self, resolved: Resolved) -> None:
        """Adds an adapter of the registry to the host, once for all concurrent callers."""
        cid = resolved.cid
        self._labels.setdefault(cid, {})[label_of(resolved)] = None
        if resolved.name is not None:
            self._full_names[cid] = full_name(resolved)
        if cid in self._host.adapters:
            return
        task = self._pulling.get(cid)
        if task is None:
            task = self._pulling[cid] = asyncio.create_task(self._pull(cid))
            task.add_done_callback(lambda done: self._pulled(cid, done))
        # A caller that is cancelled must not cancel the others.
        await asyncio.shield(task)

    async def restore(self, cid: str) -> bool:
        """Makes the files of an adapter readable again that the host could not load.

        Returns False if the adapter is not from the registry. Missing files are fetched once for
        all concurrent callers.
        """
        if self.registry is None or cid not in self._labels:
            return False
        folder = await self.registry.materialize(cid)
        card = self._host.adapters.get(cid)
        if card is None or card.path != str(folder):
            await self._host.add_adapter(str(folder))
        return True

    def rebind(self, selected: Selected) -> Selected:
        """Returns the selected adapters with the CIDs that their given names mean now.

        A reload in place may have moved a name while the prompt was tokenized.
        """
        moved = tuple(map(self._rebind_one, selected.adapters))
        if moved == selected.adapters:
            return selected
        check_distinct(moved, param="model")
        return replace(selected, adapters=moved)

    def _rebind_one(self, adapter: NamedAdapter) -> NamedAdapter:
        given = None if adapter.given is None else self.find(adapter.given)
        return adapter if given is None else replace(adapter, cid=given.cid)

    def _put(self, given: GivenName) -> GivenName:
        before = self._given.get(given.name)
        if before is not None:
            self._unlink(before)
        self._given[given.name] = given
        self._names.setdefault(given.cid, {})[given.name] = None
        return given

    def _unlink(self, given: GivenName) -> None:
        names = self._names[given.cid]
        del names[given.name]
        if not names:
            del self._names[given.cid]

    @asynccontextmanager
    async def _adding(self) -> AsyncIterator[None]:
        """Keeps unnamed adapters on the host until the context has named the one it adds."""
        self._num_adding += 1
        try:
            yield
        finally:
            self._num_adding -= 1
            await self._remove_unnamed()

    async def _remove_unnamed(self) -> None:
        while self._unnamed and not self._num_adding:
            cid = self._unnamed.pop()
            is_named = cid in self._names or cid in self._labels
            if not is_named and cid in self._host.adapters:
                await self._host.remove_adapter(cid)

    async def _pull(self, cid: str) -> None:
        assert self.registry is not None, "there is nothing to pull from"
        folder = await self.registry.materialize(cid)
        async with self._adding():
            card = await self._host.add_adapter(str(folder))
            if card.cid != cid:
                self._unnamed.add(card.cid)
                raise StoreDamaged(f"The store's files of {cid} are those of {card.cid}.")

    def _pulled(self, cid: str, task: asyncio.Task[None]) -> None:
        del self._pulling[cid]
        # Reading the exception also keeps asyncio from reporting it as never retrieved.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s cannot be served: %s", self._full_names.get(cid, cid), error)


def full_name(resolved: Resolved) -> str:
    """Returns tenant/name@version, or the CID of an adapter that was named by its CID."""
    if resolved.name is None:
        return resolved.cid
    return f"{resolved.tenant}/{resolved.name}@{resolved.version}"


def label_of(resolved: Resolved) -> str:
    """Returns tenant/name without the version, or the CID."""
    return resolved.cid if resolved.name is None else f"{resolved.tenant}/{resolved.name}"


def combination_label(recipe: Recipe, parts: Sequence[NamedAdapter]) -> str:
    """Returns method and labels without weights, such as ties(acme/german,acme/sql)."""
    return f"{recipe.method.name}({','.join(sorted(part.label for part in parts))})"


def check_distinct(adapters: Sequence[NamedAdapter], *, param: str) -> None:
    """Raises InvalidRequest if two of the names mean the same adapter."""
    repeated = find_repeated([adapter.cid for adapter in adapters])
    if repeated is not None:
        first, second = (adapters[position].text for position in repeated)
        raise InvalidRequest(
            f"`{first}` and `{second}` are the same adapter. Name it once, with the sum of the "
            "weights.",
            param=param,
        )
