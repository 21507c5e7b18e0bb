"""Adapters that the engine knows: where each came from, checked once, read again when needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loramux.adapters.packed.image import AdapterImage
from loramux.adapters.packed.packing import Packing
from loramux.adapters.peft.reader import CheckedAdapter, read_adapter
from loramux.errors import AdapterNotFound, AdapterRefused
from loramux.types.model import BaseModelInfo


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    cid: str
    folder: Path
    num_elements: int
    num_bytes: int
    max_rank: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRules:
    base: BaseModelInfo
    packing: Packing
    max_rank: int | None = None
    strict_base: bool = False


# Size, time and inode of each file of a folder: equal signatures mean that nothing was rewritten.
Signature = tuple[tuple[str, int, int, int], ...]


class AdapterCatalog:
    """register() gives a folder its CID; read() gives the packed image of a CID."""

    def __init__(self, rules: AdapterRules) -> None:
        self.rules = rules
        self.on_image: Callable[[AdapterImage], None] | None = None
        """Hears of every image that registration packed: it may be worth keeping."""
        self._known: dict[str, KnownAdapter] = {}
        self._by_folder: dict[Path, tuple[Signature, str]] = {}
        self._lock = threading.RLock()

    @property
    def base(self) -> BaseModelInfo:
        return self.rules.base

    def register(self, folder: Path) -> KnownAdapter:
        """Reads and checks the folder, unless the same files were read before."""
        folder = folder.expanduser().resolve()
        signature = _signature(folder)
        with self._lock:
            seen = self._by_folder.get(folder)
            if seen is not None and seen[0] == signature and seen[1] in self._known:
                return self._known[seen[1]]
        # Outside the lock, so that a slow disk here keeps nobody else waiting.
        adapter, image = self._read(folder)
        known = KnownAdapter(
            cid=adapter.cid,
            folder=folder,
            num_elements=image.layout.num_elements,
            num_bytes=image.num_bytes,
            max_rank=image.layout.max_rank,
            warnings=adapter.warnings,
        )
        with self._lock:
            self._known[known.cid] = known
            self._by_folder[folder] = (signature, known.cid)
        if self.on_image is not None:
            self.on_image(image)
        return known

    def forget(self, cid: str) -> None:
        """Drops all that is known of an adapter; unknown ids are fine."""
        with self._lock:
            self._known.pop(cid, None)
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

    def known(self) -> list[KnownAdapter]:
        with self._lock:
            return list(self._known.values())

    def read(self, cid: str) -> AdapterImage:
        """From its folder, checked as if it were new."""
        return self._read_known(self.get(cid))

    def _read_known(self, known: KnownAdapter) -> AdapterImage:
        adapter, image = self._read(known.folder)
        if adapter.cid != known.cid:
            raise AdapterRefused(
                "changed_on_disk",
                f"{known.folder} no longer holds {known.cid} but {adapter.cid}: its files were "
                "replaced.",
                fix="Send the request again to use the new files.",
            )
        return image

    def _read(self, folder: Path) -> tuple[CheckedAdapter, AdapterImage]:
        rules = self.rules
        adapter = read_adapter(
            folder, rules.base, max_rank=rules.max_rank, strict_base=rules.strict_base
        )
        return adapter, rules.packing.pack(adapter)


def _signature(folder: Path) -> Signature:
    if not folder.is_dir():
        raise AdapterNotFound(
            f"No adapter folder at {folder}. Give the folder that holds adapter_config.json."
        )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats)
