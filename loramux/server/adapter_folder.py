"""The watched folder of --lora-dir: each folder in it is an adapter under its own name."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from loramux.backend import AdapterHost
from loramux.errors import LoramuxError
from loramux.server.names import AdapterNames, FolderFiles, list_files
from loramux.threads import FOLDER_READS

_log = logging.getLogger(__name__)
SCAN_S = 10.0
CONFIG_NAME = "adapter_config.json"
# What a file system allows; longer names are not looked for.
MAX_NAME_CHARACTERS = 255


class AdapterFolder:
    """Names the adapters of a folder as they come, change and go. It belongs to one event loop.

    Names that were given in other ways take precedence.
    """

    def __init__(self, host: AdapterHost, names: AdapterNames, root: Path) -> None:
        self._host = host
        self._names = names
        self._root = root
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

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SCAN_S)
            try:
                await self.scan()
            except (LoramuxError, OSError) as error:
                _log.warning("%s cannot be read: %s", self._root, error)

    async def find(self, name: str) -> bool:
        """Looks for one name, and returns whether its folder has become an adapter now."""
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
                continue
            _log.warning("%s cannot be served: %s", self._root / name, card)
            if is_served:
                await self._names.unload(name)

    async def _drop(self, name: str) -> None:
        is_named = self._is_ours(name) and self._names.find(name) is not None
        del self._seen[name]
        if is_named:
            await self._names.unload(name)

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
        """The files of an adapter's folder, which may be a link; None: it is none."""
        folder = self._root / name
        return list_files(str(folder)) if (folder / CONFIG_NAME).is_file() else None


def is_plain(name: str) -> bool:
    """Whether a name is that of a folder inside another, and cannot lead out of it."""
    is_short = 0 < len(name) <= MAX_NAME_CHARACTERS
    return (
        is_short and not name.startswith(".") and name.isprintable() and not {"/", "\\"} & {*name}
    )
