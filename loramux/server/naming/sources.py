"""Adapters that requests name by their source: a folder, the hub, or a bucket."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.backend.host import AdapterHost
from loramux.base.threads import FETCHES, FOLDER_READS
from loramux.errors import AdapterRefused
from loramux.server.naming.names import (
    AdapterNames,
    FolderFiles,
    NamedAdapter,
    Selected,
    list_files,
)
from loramux.sources.config import Secret, SourceConfig
from loramux.sources.download import Progress
from loramux.sources.fetch import Fetcher, fetched
from loramux.sources.kept import KeptAdapters
from loramux.sources.origins.local import find_under_roots
from loramux.sources.parse import is_remote, parse_source
from loramux.sources.source_id import SourceId, SourceKind, split_weights


def local_folder(source: str, roots: Sequence[str]) -> Path:
    """Return the real path of a local folder; raise SourceForbidden outside the roots."""
    _, found = find_under_roots(Path(source), [Path(root) for root in roots])
    return found


def check_size(folder: Path, max_bytes: int) -> None:
    """Refuses an adapter whose weights are larger than the limit; others are left to its reader."""
    weights = folder if folder.is_file() else folder / WEIGHTS_NAME
    try:
        size = weights.stat().st_size
    except (OSError, ValueError):
        return
    if size > max_bytes:
        raise AdapterRefused(
            RefusalCode.TOO_LARGE,
            f"{weights.name} has {size} bytes; this server takes up to {max_bytes}.",
            fix="Save the adapter in a smaller dtype or rank, or raise --max-adapter-size.",
        )


@contextmanager
def fetched_folder(
    source: str,
    roots: Sequence[str],
    config: SourceConfig,
    area: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Path]:
    """Provide a folder with the source's files while the context lasts.

    Remote and local files are copied, so that no link can take their place later: call it on a
    thread.
    """
    if is_remote(source):
        found = parse_source(source, config)
    else:
        root, place = find_under_roots(Path(source), [Path(one) for one in roots])
        folder, weights_name = place.relative_to(root).parts, None
        if place.is_file():
            folder, weights_name = split_weights(folder)
        found = SourceId(
            kind=SourceKind.LOCAL, place=str(root), folder=folder, weights_name=weights_name
        )
    with fetched(Fetcher(config), found, area, progress=progress) as copies:
        yield copies


# A branch of the hub may move: its files are looked for again after this time.
FRESH_S = 300.0
MAX_SOURCES = 1024
TOKENS_FOLDER = "tokens"


@dataclass(frozen=True, slots=True)
class _Found:
    cid: str
    folder: str
    files: FolderFiles
    checked_s: float
    is_private: bool


class AdapterSources:
    """Fetches adapters on demand under the rules of a push. It belongs to one event loop.

    An adapter that was fetched with a caller's own token has no name: each caller needs a token
    with which the source gives it.
    """

    def __init__(
        self,
        host: AdapterHost,
        names: AdapterNames,
        config: SourceConfig,
        area: Path,
        *,
        max_sources: int = MAX_SOURCES,
    ) -> None:
        self._host = host
        self._names = names
        self._config = config
        self._area = area
        self._max_sources = max_sources
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[_Found]] = {}
        # Key -> the tenants whose requests have named the source.
        self._named_by: dict[str, set[str]] = {}

    async def find(
        self, text: str, source: str, *, token: Secret | None = None, tenant: str = ""
    ) -> Selected:
        """Return the adapter of an id in LoRAX's form, which the host has afterwards.

        `source`: hub, local, s3 or pbase. Raises the Source errors and AdapterRefused.
        """
        config = self._config
        is_private = token is not None and source == "hub"
        if is_private:
            config = replace(config, hub=replace(config.hub, token=token))
        # It resolves paths and checks the folder.
        parsed = await FOLDER_READS.run(parse_source, text, config, adapter_source=source)
        key = str(parsed)
        if is_private and token is not None:
            digest = hashlib.sha256(token.reveal().encode()).hexdigest()[:32]
            key = f"{digest} {key}"
        task = self._tasks.get(key)
        if task is None:
            work = self._get(key, parsed, config, is_private=is_private)
            task = self._tasks[key] = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._done(key, done))
        # A caller that is cancelled must not cancel the others.
        found = await asyncio.shield(task)
        self._named_by.setdefault(key, set()).add(tenant)
        adapter = NamedAdapter(text, found.cid, None if is_private else str(parsed))
        return Selected(text, (adapter,))

    def has_named(self, name: str) -> bool:
        """Whether a given name is of an adapter that was found here."""
        return name in self._found

    def is_known_to(self, tenant: str, name: str) -> bool:
        """Whether requests of a tenant have named the adapter with this given name here."""
        return name in self._found and tenant in self._named_by.get(name, ())

    async def folder(self, text: str) -> str:
        """Fetch a remote source such as `hf:owner/name`, and returns its folder."""
        source = await FOLDER_READS.run(parse_source, text, self._config)
        return await FETCHES.run(self._folder, str(source), source, self._config)

    async def _get(
        self, key: str, source: SourceId, config: SourceConfig, *, is_private: bool
    ) -> _Found:
        found = self._found.get(key)
        now = time.monotonic()
        is_here = found is not None and found.cid in self._host.adapters
        if found is not None and is_here and now < found.checked_s + FRESH_S:
            self._found.move_to_end(key)
            return found
        folder = await FETCHES.run(self._folder, key, source, config)
        files = await FOLDER_READS.run(list_files, folder)
        if found is None or not is_here or (found.folder, found.files) != (folder, files):
            if is_private:
                card = await self._host.add_adapter(folder)
            else:
                card = await self._names.load(str(source), folder)
            found = _Found(card.cid, folder, files, now, is_private)
        self._found[key] = replace(found, checked_s=now)
        self._found.move_to_end(key)
        await self._forget_oldest()
        return found

    def _folder(self, key: str, source: SourceId, config: SourceConfig) -> str:
        if source.kind is SourceKind.LOCAL:
            return str(source)
        area = self._area
        if " " in key:
            area = area / TOKENS_FOLDER / key.partition(" ")[0]
        return str(KeptAdapters(config, area).folder(str(source)))

    def _done(self, key: str, task: asyncio.Task[_Found]) -> None:
        del self._tasks[key]
        # Reading the exception keeps asyncio from reporting it as never retrieved.
        if not task.cancelled():
            task.exception()

    async def _forget_oldest(self) -> None:
        while len(self._found) > self._max_sources:
            key, found = self._found.popitem(last=False)
            self._named_by.pop(key, None)
            if not found.is_private and self._names.find(key) is not None:
                await self._names.unload(key)
