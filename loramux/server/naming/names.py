"""The names of adapters on this server; the engine knows adapters by CID only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from loramux.adapters.recipe import Recipe
from loramux.backend.host import AdapterHost
from loramux.base.threads import FOLDER_READS
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    InvalidRequest,
    LoramuxError,
    StoreDamaged,
)
from loramux.registry.names import AdapterName
from loramux.registry.records import Resolved
from loramux.server.errors import OtherContent
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.view import View
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.composition import SumPart, check_alone, compose, find_repeated
from loramux.types.request import Selection

_log = logging.getLogger(__name__)

MAX_UNLOADED = 1000
"""Names that were unloaded and are remembered, for error messages."""


AdapterState = Literal["registered", "ready", "failed"]
"""registered: its header was checked and its weights were not read yet; failed: it was refused."""
# (name, size, modification time, inode) of each file: equal lists mean unchanged files.
FolderFiles = tuple[tuple[str, int, int, int], ...]
Check = Callable[[AdapterCard], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter was refused when its weights were read, and the files it was read from."""

    error: AdapterRefused
    files: FolderFiles


@dataclass(frozen=True, slots=True)
class GivenName:
    """A name that was given by --lora-modules or by vLLM's load call."""

    name: str
    cid: str | None
    """None: the weights were not read yet, or the adapter was refused."""
    path: str
    created_s: int
    rank: int = 0
    num_bytes: int = 0
    failure: Failure | None = None

    @property
    def state(self) -> AdapterState:
        if self.cid is not None:
            return "ready"
        return "registered" if self.failure is None else "failed"


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
    """The adapters of a combination that a request made, in the order of the request."""
    part_of: Resolved | None = None
    """The version of the registry, a sum, that named this adapter."""
    expected: frozenset[str] | None = None
    """The contents that may answer to a given name; None: any."""

    @property
    def label(self) -> str:
        """The adapter's label in shares and metrics, without its version."""
        if self.resolved is not None:
            return label_of(self.resolved)
        if self.recipe is not None:
            return combination_label(self.recipe, self.parts)
        return self.cid if self.given is None else self.given

    @property
    def version_cid(self) -> str:
        """The CID of the version that was named: of a recipe, or of the adapter itself."""
        named = self.part_of or self.resolved
        return self.cid if named is None else named.cid

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

    takes_weights: ClassVar[bool] = False
    """Whether adapters that can only be used alone may have a weight."""

    def __init__(self, host: AdapterHost, registry: RegistryAdapters | None = None) -> None:
        self.registry = registry
        self._host = host
        self._given: dict[str, GivenName] = {}
        # Name -> seconds since the epoch, the oldest first.
        self._unloaded: dict[str, float] = {}
        # CID -> its given names, in order.
        self._names: dict[str, dict[str, None]] = {}
        # Folder -> its given names without a CID, in order.
        self._unread: dict[str, dict[str, None]] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        # CIDs from the registry -> the labels by which requests have named them, each with the
        # full name of its last request.
        self._labels: dict[str, dict[str, str]] = {}
        # CIDs from the registry -> the full name of the last request.
        self._full_names: dict[str, str] = {}
        # CIDs of combinations -> their label.
        self._combined: dict[str, str] = {}
        # CIDs of combinations that are versions of the registry -> their full name.
        self._made_names: dict[str, str] = {}
        # CIDs of combinations -> the tenants whose requests have named their parts.
        self._combined_by: dict[str, set[str]] = {}
        self._sums: dict[str, Resolved] = {}
        self._pulling: dict[str, asyncio.Task[None]] = {}
        # An adapter without names stays while the host adds any: it may be the same adapter.
        self._num_adding = 0
        self._unnamed: set[str] = set()

    @property
    def may_have_adapters(self) -> bool:
        """Whether requests can name any adapter."""
        return bool(self._given) or self.registry is not None

    def described(self, given: GivenName) -> dict[str, Any]:
        """Return what lists of models say of a given name besides the fields of every model."""
        return {}

    def find(self, name: str) -> GivenName | None:
        """Return a given name or None; its adapter may not have been read yet."""
        given = self._given.get(name)
        if given is None or given.cid is None or given.cid in self._host.adapters:
            return given
        # The host has lost the adapter, and reads it again before its next use.
        return self._put(replace(given, cid=None))

    async def identify(self, name: str) -> GivenName | None:
        """Return a given name with its CID; read the adapter first if that was not done yet.

        One read serves all concurrent callers. Raises AdapterRefused; an adapter that was refused
        is read again once its files have changed.
        """
        while (given := self.find(name)) is not None and given.cid is None:
            failure = given.failure
            if failure is not None:
                files = await FOLDER_READS.run(list_files, given.path)
                if files == failure.files and self._given.get(name) is given:
                    raise AdapterRefused(
                        failure.error.code, failure.error.reason, fix=failure.error.fix
                    )
            await self._read(given.path)
        return given

    def given(self) -> list[GivenName]:
        """Return all given names in the order in which they were added."""
        return [found for name in list(self._given) if (found := self.find(name)) is not None]

    def names_of(self, cid: str) -> list[str]:
        """Return the given names of an adapter, and its last full name in the registry."""
        names = list(self._names.get(cid, ()))
        names += [self._made_names[cid]] if cid in self._made_names else []
        return [*names, self._full_names.get(cid, cid)] if cid in self._labels else names

    def labels_of(self, cid: str) -> list[str]:
        """Return the labels of an adapter in metrics: given names, and registry names without
        their version."""
        labels = [*self._names.get(cid, ()), *self._labels.get(cid, ())]
        return [*labels, self._combined[cid]] if cid in self._combined else labels

    def add_combination(self, combined: NamedAdapter, *, tenant: str = "") -> None:
        """Record the label of a combination for metrics, its name if it is a version, and the
        tenant of the request."""
        self._combined[combined.cid] = combined.label
        self._combined_by.setdefault(combined.cid, set()).add(tenant)
        if combined.resolved is not None:
            self._made_names[combined.cid] = full_name(combined.resolved)

    @property
    def sums(self) -> Mapping[str, Resolved]:
        """The sums of the registry that requests have named, by CID."""
        return self._sums

    def sees_combination(self, cid: str, view: View) -> bool:
        """Whether the caller may use a combination by its CID: its tenant has made it too."""
        if view.is_whole:
            return True
        return view.caller.adapters is None and view.tenant in self._combined_by.get(cid, ())

    def visible_names(self, cid: str, view: View) -> list[str]:
        """Return the names of an adapter that the caller sees."""
        if view.is_whole:
            return self.names_of(cid)
        return view.visible(self._names.get(cid, ()), self._registry_names(cid))

    def is_exclusive(self, cid: str, view: View) -> bool:
        """Whether only the caller's tenant can have used the adapter under its names."""
        registered = self._registry_names(cid)
        owners = {name.partition("/")[0] for name in registered} | self._combined_by.get(cid, set())
        by_cid = cid in self._labels.get(cid, ())
        is_own = not by_cid and not self._names.get(cid) and owners == {view.tenant}
        return is_own and not any(
            AdapterName(*name.partition("@")[0].split("/")) in view.access.shares
            for name in registered
        )

    def _registry_names(self, cid: str) -> list[str]:
        """Return the full names in the registry by which requests have named an adapter."""
        full = [self._made_names[cid]] if cid in self._made_names else []
        labels = self._labels.get(cid, {})
        return [*full, *(name for label, name in labels.items() if label != cid)]

    def add_sum(self, resolved: Resolved) -> None:
        self._sums[resolved.cid] = resolved

    def unread(self) -> dict[str, list[GivenName]]:
        """Return the given names without a CID by folder, in the order of their addition."""
        return {path: [self._given[name] for name in names] for path, names in self._unread.items()}

    async def load(
        self, name: str, path: str, *, is_real: bool = False, check: Check | None = None
    ) -> AdapterCard:
        """Add the folder's adapter to the host, and give it the name; raise AdapterRefused.

        `is_real`: the path is a real path that was checked, and the adapter must be read there.
        `check`: what the adapter must pass before it gets the name.
        """
        async with self._adding():
            card = await self._host.add_adapter(path)
            try:
                if is_real and not _is_at(card, path):
                    raise _moved(path)
                if check is not None:
                    await check(card)
            except BaseException:
                self._unnamed.add(card.cid)
                raise
            before = self._given.get(name)
            self.bind(name, card)
            if before is not None and before.cid is not None:
                self._unnamed.add(before.cid)
        return card

    def bind(
        self, name: str, card: AdapterCard | InspectedCard, *, created_s: int | None = None
    ) -> None:
        """Give a name to an adapter that the host has, or whose header the host has checked."""
        created_s = int(time.time()) if created_s is None else created_s
        cid = card.cid if isinstance(card, AdapterCard) else None
        before = self._given.get(name)
        if before is not None and before.cid not in (None, cid):
            self._unnamed.add(str(before.cid))
        self._put(GivenName(name, cid, card.path, created_s, card.rank, card.num_bytes))

    def unloaded_s(self, name: str) -> float | None:
        """Return when a name was taken from its adapter; None: it was not, or long ago."""
        return None if name in self._given else self._unloaded.get(name)

    async def unload(self, name: str) -> None:
        given = self._given.pop(name, None)
        if given is None:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")
        self._unloaded.pop(name, None)
        self._unloaded[name] = time.time()
        if len(self._unloaded) > MAX_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]
        self._unlink(given)
        if given.cid is not None:
            self._unnamed.add(given.cid)
        await self._remove_unnamed()

    async def pull(self, resolved: Resolved) -> None:
        """Add an adapter of the registry to the host, once for all concurrent callers."""
        cid = resolved.cid
        self._labels.setdefault(cid, {})[label_of(resolved)] = full_name(resolved)
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
        """Make an adapter loadable again that the host could not load; return whether it is.

        Missing files of an adapter of the registry are fetched. The folder of a given name is read
        again: if its files have changed, its names move to the new adapter, and False is returned.
        Concurrent callers share the work.
        """
        if self.registry is None or cid not in self._labels:
            return await self._read_again(cid)
        folder = await self.registry.materialize(cid)
        card = self._host.adapters.get(cid)
        if card is None or card.path != str(folder):
            await self._host.add_adapter(str(folder))
        return True

    def rebind(self, selected: Selected) -> Selected:
        """Return the selected adapters with the CIDs that their given names mean now.

        A reload in place may have moved a name while the prompt was tokenized.
        """
        moved = tuple(map(self._rebind_one, selected.adapters))
        if moved == selected.adapters:
            return selected
        check_distinct(moved, param="model")
        self.check_alone(moved, param="model")
        return replace(selected, adapters=moved)

    def check_alone(self, adapters: Iterable[NamedAdapter], *, param: str) -> None:
        """Raise InvalidRequest if one of several adapters, or a weighted one, must be alone."""
        cards = self._host.adapters
        parts = [
            SumPart(one.text, one.weight, cards[one.cid].only_alone if one.cid in cards else "")
            for one in adapters
        ]
        check_alone(parts, param=param, takes_weights=self.takes_weights)

    def tokenizers_of(self, selected: Selected) -> tuple[str, ...]:
        """Return the digest of the tokenizer files of each adapter; empty for none."""
        cards = self._host.adapters
        return tuple(
            cards[one.cid].tokenizer_digest if one.cid in cards else "" for one in selected.adapters
        )

    def _rebind_one(self, adapter: NamedAdapter) -> NamedAdapter:
        given = None if adapter.given is None else self.find(adapter.given)
        if given is None or given.cid is None:
            return adapter
        check_expected(adapter.text, given.cid, adapter.expected)
        return replace(adapter, cid=given.cid)

    def _put(self, given: GivenName) -> GivenName:
        before = self._given.get(given.name)
        if before is not None:
            self._unlink(before)
        self._given[given.name] = given
        table, key = self._index_of(given)
        table.setdefault(key, {})[given.name] = None
        return given

    def _unlink(self, given: GivenName) -> None:
        table, key = self._index_of(given)
        del table[key][given.name]
        if not table[key]:
            del table[key]

    def _index_of(self, given: GivenName) -> tuple[dict[str, dict[str, None]], str]:
        if given.cid is None:
            return self._unread, given.path
        return self._names, given.cid

    async def _read(self, path: str) -> None:
        """Read a folder and give its names their CID, once for all concurrent callers."""
        task = self._reading.get(path)
        if task is None:
            task = self._reading[path] = asyncio.create_task(self._read_folder(path))
            task.add_done_callback(lambda done: self._read_ended(path, done))
        # A caller that is cancelled must not cancel the others.
        await asyncio.shield(task)

    async def _read_folder(self, path: str) -> None:
        # Listed before they are read: files that change meanwhile are read again.
        files = await FOLDER_READS.run(list_files, path)
        async with self._adding():
            try:
                card = await self._host.add_adapter(path)
                if not _is_at(card, path):
                    self._unnamed.add(card.cid)
                    raise _moved(path)
            except (AdapterRefused, AdapterNotFound) as error:
                refusal = _as_refusal(error)
                self._settle(path, failure=Failure(refusal, files))
                raise refusal from error
            self._settle(path, card=card)
            # All its names may have been unloaded meanwhile.
            self._unnamed.add(card.cid)
        for warning in card.warnings:
            _log.warning("adapter %s: %s", path, warning)

    def _settle(
        self, path: str, *, card: AdapterCard | None = None, failure: Failure | None = None
    ) -> None:
        """Record the result of a read for all names that still wait for it."""
        cid = None if card is None else card.cid
        for name in list(self._unread.get(path, ())):
            self._put(replace(self._given[name], cid=cid, failure=failure))

    def _read_ended(self, path: str, task: asyncio.Task[None]) -> None:
        del self._reading[path]
        # Reading the exception also keeps asyncio from reporting it as never retrieved.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the adapter at %s cannot be served: %s", path, error)

    async def _read_again(self, cid: str) -> bool:
        """Read the folder of an adapter that could not be loaded; return whether it is its."""
        card = self._host.adapters.get(cid)
        if card is None:
            return False
        async with self._adding():
            for given in [self._given[name] for name in self._names.get(cid, ())]:
                self._put(replace(given, cid=None))
            self._unnamed.add(cid)
            if card.path not in self._unread:
                return False
            try:
                await self._read(card.path)
            except LoramuxError:
                return False
        return cid in self._names

    @asynccontextmanager
    async def _adding(self) -> AsyncIterator[None]:
        """Keep unnamed adapters on the host until the context has named the one it adds."""
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


def list_files(place: str) -> FolderFiles:
    """List a file, or the files of a folder; an empty list if it cannot be read."""
    path = Path(place)
    try:
        entries = [path] if path.is_file() else path.iterdir()
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    except OSError:
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats)


def _is_at(card: AdapterCard, path: str) -> bool:
    """Whether the adapter was read at a path; that of an image adapter may be its folder."""
    return card.path == path or Path(card.path).parent == Path(path)


def _moved(path: str) -> AdapterRefused:
    return AdapterRefused(
        "changed_on_disk",
        f"{path} was replaced by a link to another folder.",
        fix="Load the adapter from the folder that it is in.",
    )


def _as_refusal(error: AdapterRefused | AdapterNotFound) -> AdapterRefused:
    """Return a folder that was there at the start and is gone refuses the adapter, not its name."""
    if isinstance(error, AdapterRefused):
        return error
    return AdapterRefused(
        "unreadable", str(error), fix="Restore the folder, or load the adapter from another one."
    )


def full_name(resolved: Resolved) -> str:
    """Return tenant/name@version, or the CID of an adapter that was named by its CID."""
    if resolved.name is None:
        return resolved.cid
    return f"{resolved.tenant}/{resolved.name}@{resolved.version}"


def label_of(resolved: Resolved) -> str:
    """Return tenant/name without the version, or the CID."""
    return resolved.cid if resolved.name is None else f"{resolved.tenant}/{resolved.name}"


def combination_label(recipe: Recipe, parts: Sequence[NamedAdapter]) -> str:
    """Return method and labels without weights, such as ties(acme/german,acme/sql)."""
    return f"{recipe.method.name}({','.join(sorted(part.label for part in parts))})"


def check_expected(name: str, cid: str, expected: frozenset[str] | None) -> None:
    """Raise OtherContent if the request allows no such content behind a name."""
    if expected is not None and cid not in expected:
        raise OtherContent(name)


def check_distinct(adapters: Sequence[NamedAdapter], *, param: str) -> None:
    """Raise InvalidRequest if two of the names mean the same adapter."""
    repeated = find_repeated([adapter.cid for adapter in adapters])
    if repeated is not None:
        first, second = (adapters[position].text for position in repeated)
        raise InvalidRequest(
            f"`{first}` and `{second}` are the same adapter. Name it once, with the sum of the "
            "weights.",
            param=param,
        )
