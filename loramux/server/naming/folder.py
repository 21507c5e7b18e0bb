"""The watched folder of --lora-dir: each folder in it is an adapter under its own name."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from loramux.backend.host import AdapterHost
from loramux.base.threads import FOLDER_READS, QUERIES
from loramux.errors import LoramuxError
from loramux.registry.audit import Action, Actor, Event
from loramux.server.naming.names import AdapterNames, FolderFiles, list_files

_log = logging.getLogger(__name__)
SCAN_S = 10.0
CONFIG_NAME = "adapter_config.json"
# What a file system allows; longer names are not looked for.
MAX_NAME_CHARACTERS = 255
ACTOR = Actor(address="--lora-dir")


class AdapterFolder:
    """Names the adapters of a folder as they come, change and go. It belongs to one event loop.

    Names that were given in other ways take precedence. What changes after the first scan is
    recorded in the audit log.
    """

    def __init__(
        self, host: AdapterHost, names: AdapterNames, root: Path, *, home_tenant: str = ""
    ) -> None:
        """`home_tenant`: the one that names without a tenant belong to."""
        self._host = host
        self._names = names
        self._root = root
        self._home_tenant = home_tenant
        self._is_scanned = False
        # Name -> the files as they were when the name was given, or when the adapter was refused.
        self._seen: dict[str, FolderFiles] = {}
        self._lock = asyncio.Lock()

    async def scan(self) -> None:
        """Names new and changed adapters, and unloads those whose folders are gone."""
        async with self._lock:
            found = await FOLDER_READS.run(self._list)
            for name in [name for name in self._seen if name not in found]:
                await self._drop(name)
            await self._add(found)
            self._is_scanned = True

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SCAN_S)
            try:
                await self.scan()
            except (LoramuxError, OSError) as error:
                _log.warning("%s cannot be read: %s", self._root, error)

    async def find(self, name: str) -> bool:
        """Look for one name, and return whether its folder has become an adapter now."""
        if not is_plain(name):
            return False
        async with self._lock:
            files = await FOLDER_READS.run(self._files, name)
            if files is None:
                return False
            await self._add({name: files})
        return self._names.find(name) is not None

    async def _add(self, found: dict[str, FolderFiles]) -> None:
        new = {
            name: files
            for name, files in found.items()
            if self._seen.get(name) != files and self._is_ours(name)
        }
        cards = await self._host.inspect_adapters([str(self._root / name) for name in new])
        for (name, files), card in zip(new.items(), cards, strict=True):
            is_served = name in self._seen and self._names.find(name) is not None
            self._seen[name] = files
            if not isinstance(card, LoramuxError):
                self._names.bind(name, card)
                await self._record(Action.LOAD, name)
                continue
            _log.warning("%s cannot be served: %s", self._root / name, card)
            if is_served:
                await self._unload(name)

    async def _drop(self, name: str) -> None:
        is_named = self._is_ours(name) and self._names.find(name) is not None
        del self._seen[name]
        if is_named:
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        await self._names.unload(name)
        await self._record(Action.UNLOAD, name)

    async def _record(self, action: Action, name: str) -> None:
        registry = self._names.registry
        if registry is None or not self._is_scanned:
            return
        event = Event(action, self._home_tenant, name, {"source": str(self._root / name)})
        try:
            await QUERIES.run(registry.registry.audit.record, ACTOR, event)
        # The files have changed already; requests are answered all the same.
        except LoramuxError as error:
            _log.warning("The %s of %s is not in the audit log: %s", action, name, error)

    def _is_ours(self, name: str) -> bool:
        given = self._names.find(name)
        return given is None or given.path == str(self._root / name)

    def _list(self) -> dict[str, FolderFiles]:
        try:
            names = sorted(entry.name for entry in self._root.iterdir())
        except OSError as error:
            _log.warning("%s cannot be read: %s", self._root, error)
            return {}
        files = {name: self._files(name) for name in names if is_plain(name)}
        return {name: one for name, one in files.items() if one is not None}

    def _files(self, name: str) -> FolderFiles | None:
        """Return the files of an adapter's folder, which may be a link; None: it is none."""
        folder = self._root / name
        return list_files(str(folder)) if (folder / CONFIG_NAME).is_file() else None


def is_plain(name: str) -> bool:
    """Whether a name is that of a folder inside another, and cannot lead out of it."""
    is_short = 0 < len(name) <= MAX_NAME_CHARACTERS
    return (
        is_short and not name.startswith(".") and name.isprintable() and not {"/", "\\"} & {*name}
    )
