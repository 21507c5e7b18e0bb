"""The registered adapters of an image model by CID, and how their files become packed images."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapters.packed.image import AdapterImage
from loramux.backend.images import ImageAdapterCard
from loramux.diffusion.adapter import ImageAdapter
from loramux.diffusion.lora_files.names import PipelineNames
from loramux.diffusion.lora_files.reader import AdapterReport, read_adapter
from loramux.diffusion.packing import ImagePacking
from loramux.errors import AdapterNotFound, AdapterRefused, DoesNotFit

_ONLY_ALONE = "it is DoRA, which scales the rows of weights"


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read, checked and packed before its first use."""

    card: ImageAdapterCard
    image: AdapterImage
    read_s: float
    report: AdapterReport | None = None
    """None without a file."""


class ImageCatalog:
    """Knows adapters by their cards; any thread may call it."""

    def __init__(self, names: PipelineNames, packing: ImagePacking, *, max_bytes: int) -> None:
        """`max_bytes`: an adapter with more has no place on the device or in host memory."""
        self._names = names
        self._packing = packing
        self._max_bytes = max_bytes
        self._known: dict[str, ImageAdapterCard] = {}
        # Adapters that were given as tensors have no file to be read from again.
        self._given: dict[str, AdapterImage] = {}
        self._lock = threading.Lock()

    def __contains__(self, cid: str) -> bool:
        return cid in self._known

    def get(self, cid: str) -> ImageAdapterCard:
        try:
            return self._known[cid]
        except KeyError:
            raise AdapterNotFound(f"No adapter {cid} is registered.") from None

    def known(self) -> list[ImageAdapterCard]:
        with self._lock:
            return list(self._known.values())

    def identify(self, place: Path) -> ReadAdapter:
        """Read, check and pack a file or folder; raise AdapterRefused or DoesNotFit."""
        began = time.perf_counter()
        adapter, report = read_adapter(place, self._names)
        self._check_size(adapter)
        image = self._packing.pack(adapter)
        card = _card(adapter, image, place, report)
        return ReadAdapter(card, image, time.perf_counter() - began, report)

    def adopt(self, card: ImageAdapterCard) -> None:
        """Make an adapter known by its card alone; a load checks its files."""
        with self._lock:
            self._known[card.cid] = card

    def give(self, adapter: ImageAdapter) -> ReadAdapter:
        """Make an adapter known that has no file; it is kept until it is forgotten."""
        self._check_size(adapter)
        image = self._packing.pack(adapter)
        with self._lock:
            self._given[adapter.cid] = image
        card = _card(adapter, image)
        self.adopt(card)
        return ReadAdapter(card, image, 0.0)

    def forget(self, cid: str) -> None:
        with self._lock:
            self._known.pop(cid, None)
            self._given.pop(cid, None)

    def read(self, cid: str) -> AdapterImage:
        """Read, check and pack a registered adapter; called on the loader's threads."""
        given = self._given.get(cid)
        if given is not None:
            return given
        known = self.get(cid)
        adapter, _ = read_adapter(Path(known.path), self._names)
        if adapter.cid != cid:
            raise AdapterRefused(
                "changed_on_disk",
                f"{known.path} no longer holds {cid} but {adapter.cid}: the file was replaced.",
                fix="Add the adapter again to use the new file.",
            )
        return self._packing.pack(adapter)

    def verify(self, cid: str) -> ImageAdapterCard:
        """Read an adapter again as a cold load does; raise AdapterRefused."""
        self.read(cid)
        return self.get(cid)

    def examine(self, place: Path) -> dict[str, Any]:
        """Return what a file contains, or why it is refused."""
        try:
            adapter, report = read_adapter(place, self._names)
        except AdapterRefused as error:
            refusal = {"code": error.code, "reason": error.reason, "fix": error.fix}
            return {"ok": False, "adapter": str(place), "refusal": refusal}
        return {
            "ok": True,
            "adapter": str(report.path),
            "cid": report.cid,
            "formats": list(report.formats),
            "method": report.method,
            "components": dict(report.num_modules),
            "ranks": {str(rank): count for rank, count in report.ranks.items()},
            "size_bytes": report.num_bytes,
            "device_bytes": self._num_bytes(adapter),
            "trigger_words": list(report.trigger_words),
        }

    def _num_bytes(self, adapter: ImageAdapter) -> int:
        pairs = (pair for modules in adapter.components.values() for pair in modules.values())
        return sum(pair.num_elements for pair in pairs) * self._packing.dense.dtype.itemsize

    def _check_size(self, adapter: ImageAdapter) -> None:
        num_bytes = self._num_bytes(adapter)
        if num_bytes > self._max_bytes:
            raise DoesNotFit(
                f"The adapter takes {num_bytes} bytes, and there are {self._max_bytes} for "
                "adapters. Raise --image-adapter-memory and --host-memory, or train a lower rank."
            )


def _card(
    adapter: ImageAdapter,
    image: AdapterImage,
    place: Path | None = None,
    report: AdapterReport | None = None,
) -> ImageAdapterCard:
    return ImageAdapterCard(
        cid=adapter.cid,
        path="" if place is None else str(place.absolute()),
        rank=adapter.rank,
        num_bytes=image.num_bytes,
        num_modules={name: len(modules) for name, modules in adapter.components.items()},
        file_bytes=0 if report is None else report.num_bytes,
        formats=() if report is None else report.formats,
        method="" if report is None else report.method,
        only_alone=_ONLY_ALONE if adapter.is_dora else "",
        trigger_words=() if report is None else report.trigger_words,
    )
