"""Adapters that the engine knows: checked once, packed, and kept in host memory while it lasts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.adapters.image import AdapterImage, Site, pack_adapter
from loramux.adapters.reader import CheckedAdapter, read_adapter
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.types import BaseModelInfo


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    cid: str
    folder: Path
    num_elements: int
    max_rank: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRules:
    base: BaseModelInfo
    sites: tuple[Site, ...]
    dtype: torch.dtype
    max_rank: int | None = None
    strict_base: bool = False


# Size, time and inode of each file of a folder: equal signatures mean that nothing was rewritten.
Signature = tuple[tuple[str, int, int, int], ...]


class AdapterCatalog:
    """register() gives a folder its CID; load() gives the packed image of a CID."""

    def __init__(self, rules: AdapterRules, *, host_memory_bytes: int) -> None:
        self._rules = rules
        self._host_memory_bytes = host_memory_bytes
        self._known: dict[str, KnownAdapter] = {}
        self._by_folder: dict[Path, tuple[Signature, str]] = {}
        # Least recently used first.
        self._images: OrderedDict[str, AdapterImage] = OrderedDict()
        self._image_bytes = 0
        self._lock = threading.RLock()

    @property
    def base(self) -> BaseModelInfo:
        return self._rules.base

    def register(self, folder: Path) -> KnownAdapter:
        """Reads and checks the folder, unless the same files were read before."""
        folder = folder.expanduser().resolve()
        signature = _signature(folder)
        with self._lock:
            seen = self._by_folder.get(folder)
            if seen is not None and seen[0] == signature and seen[1] in self._known:
                return self._known[seen[1]]
        # Outside the lock, so that a slow disk here never keeps load() waiting.
        adapter, image = self._read(folder)
        known = KnownAdapter(
            cid=adapter.cid,
            folder=folder,
            num_elements=image.layout.num_elements,
            max_rank=image.layout.max_rank,
            warnings=adapter.warnings,
        )
        with self._lock:
            self._known[known.cid] = known
            self._by_folder[folder] = (signature, known.cid)
            self._keep(image)
        return known

    def forget(self, cid: str) -> None:
        """Drops all that is known of an adapter; unknown ids are fine."""
        with self._lock:
            self._known.pop(cid, None)
            image = self._images.pop(cid, None)
            if image is not None:
                self._image_bytes -= image.num_bytes
            for folder in [f for f, (_, known) in self._by_folder.items() if known == cid]:
                del self._by_folder[folder]

    def verify(self, cid: str) -> KnownAdapter:
        """Reads the folder as if nothing were in memory; refuses if it holds another adapter."""
        known = self.get(cid)
        self._read_known(known)
        return known

    def get(self, cid: str) -> KnownAdapter:
        try:
            return self._known[cid]
        except KeyError:
            raise AdapterNotFound(f"No adapter with content id {cid} is known here.") from None

    def num_elements(self, cid: str) -> int:
        return self.get(cid).num_elements

    def load(self, cid: str) -> AdapterImage:
        with self._lock:
            image = self._images.get(cid)
            if image is not None:
                self._images.move_to_end(cid)
                return image
            known = self.get(cid)
            image = self._read_known(known)
            self._keep(image)
            return image

    @property
    def host_bytes(self) -> int:
        return self._image_bytes

    def _read_known(self, known: KnownAdapter) -> AdapterImage:
        adapter, image = self._read(known.folder)
        if adapter.cid != known.cid:
            raise AdapterRefused(
                "changed_on_disk",
                f"{known.folder} no longer holds {known.cid}: its files were replaced.",
                fix="Send the request again to use the new files.",
            )
        return image

    def _read(self, folder: Path) -> tuple[CheckedAdapter, AdapterImage]:
        rules = self._rules
        adapter = read_adapter(
            folder, rules.base, max_rank=rules.max_rank, strict_base=rules.strict_base
        )
        return adapter, pack_adapter(adapter, rules.sites, rules.dtype)

    def _keep(self, image: AdapterImage) -> None:
        if image.cid in self._images:
            return
        self._images[image.cid] = image
        self._image_bytes += image.num_bytes
        while self._image_bytes > self._host_memory_bytes and len(self._images) > 1:
            _, dropped = self._images.popitem(last=False)
            self._image_bytes -= dropped.num_bytes


def _signature(folder: Path) -> Signature:
    if not folder.is_dir():
        raise AdapterNotFound(
            f"No adapter folder at {folder}. Give the folder that holds adapter_config.json."
        )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats)
