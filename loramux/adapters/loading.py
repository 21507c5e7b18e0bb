"""Reads, hashes, checks and packs an adapter folder in one pass over its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from loramux.adapters.identity import compute_cid, make_manifest
from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.packed.image import AdapterImage, AdapterLayout
from loramux.adapters.packed.packing import Packing
from loramux.adapters.packed.paged import ModuleKey
from loramux.adapters.packed.writers import ModuleWriter, write_extra
from loramux.adapters.peft.inspection import InspectedAdapter, Inspector, is_same_base
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, ExtraTensor, LoraModule
from loramux.adapters.peft.reader import check_values, make_parts
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.adapters.peft.tokenizer_files import digest_of_files, digest_tokenizer_files
from loramux.adapters.peft.weights import WeightsReading
from loramux.adapters.rescale import FoldedScales, OriginalWeights, rescaled
from loramux.adapters.row_order import in_engine_order
from loramux.adapters.values import RankMaxima
from loramux.adapters.workers import CALLING_THREAD, Workers
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo

_MAX_LAYOUTS = 256
# Parts of the packing for each worker thread, so that all end at about the same time.
_PARTS_PER_THREAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRules:
    """What an adapter must comply with to be served here, and how it is packed."""

    base: BaseModelInfo
    packing: Packing
    max_rank: int | None = None
    strict_base: bool = False
    base_weights: BaseWeights | None = None
    """The weights that some parts are computed from; None: such parts are not made."""
    max_bytes: int | None = None
    """The size of the pool; a larger image is refused before the weights are read."""
    folded: FoldedScales | None = None
    """The scales by which the base differs from the model that adapters were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds from the start of a load until the end of each phase; phases overlap."""

    inspect_s: float
    read_s: float
    hash_s: float
    pack_s: float
    """Until all weights are packed and the largest value of each rank is known."""
    total_s: float


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter whose values passed all checks, with its packed image."""

    image: AdapterImage
    warnings: tuple[str, ...]
    """The warnings about its values."""
    times: LoadTimes
    tokenizer_digest: str = ""
    """Digest of its tokenizer files; empty: it has none."""


_LayoutKey = tuple[tuple[tuple[ModuleKey, int], ...], tuple[ExtraSpec, ...]]


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    layout: AdapterLayout
    max_rank: int


class FolderLoader:
    """Inspects and loads adapter folders, given by their real paths; any thread may call it."""

    def __init__(self, rules: AdapterRules, workers: Workers = CALLING_THREAD) -> None:
        """`workers`: read and pack parts of an adapter while the calling thread hashes it."""
        self._packing = rules.packing
        self._base = rules.base
        self._reorders = any(projection.row_map for projection in rules.base.projections)
        self._base_weights = rules.base_weights
        self._folded = rules.folded
        self._max_bytes = rules.max_bytes
        self._workers = workers
        self._inspector = Inspector(
            rules.base, max_rank=rules.max_rank, strict_base=rules.strict_base
        )
        self._layouts: dict[_LayoutKey, PlannedLayout] = {}

    def inspect(self, folder: Path) -> InspectedAdapter:
        """Check config and header; raise AdapterRefused."""
        return self._inspector.inspect(folder)

    def plan(self, found: InspectedAdapter) -> PlannedLayout:
        ranks, extras = found.ranks, found.extras
        key = tuple(ranks.items()), extras
        planned = self._layouts.get(key)
        if planned is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._packing.plan(ranks, extras)
            planned = self._layouts[key] = PlannedLayout(layout, layout.max_rank)
            self._make_ready(layout)
        return planned

    def load(self, folder: Path) -> LoadedAdapter:
        """Read the weights once; raise AdapterRefused."""
        loaded = self._load(folder)
        # Not before the bytes of the file are unmapped: pinning locks the process's memory map.
        self._make_ready(loaded.image.layout)
        return loaded

    def _load(self, folder: Path) -> LoadedAdapter:
        began = time.perf_counter()
        with self._inspector.open(folder) as (found, weights):
            inspected = time.perf_counter()
            layout = self.plan(found).layout
            self._check_size(layout)
            prepared = self._workers.start(partial(_prepare, self._packing, layout))
            with weights.reading(self._workers) as reading:
                folded = self._folded_for(found)
                if self._reorders or folded is not None or not found.contents.are_views:
                    reading.wait()
                made = self._make(found, reading, folded)
                _check_complete(made, layout)
                parts = self._start_packing(made, reading, prepared)
                digest = reading.digest()
            hashed = time.perf_counter()
        packed = [part() for part in parts]
        modules = made.modules
        maxima = [found for part in packed for found in part.maxima]
        warnings = check_values(modules, maxima, extras=[x for p in packed for x in p.extras])
        self._packing.check(modules, maxima)
        tokenizer = digest_tokenizer_files(folder)
        manifest = make_manifest(found.config.canonical(), {WEIGHTS_NAME: digest, **tokenizer})
        image = AdapterImage(cid=compute_cid(manifest), layout=layout, buffer=prepared().buffer)
        times = LoadTimes(
            inspect_s=inspected - began,
            read_s=min(part.began for part in packed) - began,
            hash_s=hashed - began,
            pack_s=max(part.ended for part in packed) - began,
            total_s=time.perf_counter() - began,
        )
        return LoadedAdapter(image, warnings, times, digest_of_files(tokenizer))

    def _folded_for(self, found: InspectedAdapter) -> FoldedScales | None:
        """Return the scales to fit the adapter to; none if it was trained on this checkpoint."""
        recorded = found.config.base_model_name
        is_own = recorded is not None and is_same_base(recorded, self._base)
        return None if is_own else self._folded

    def _make(
        self, found: InspectedAdapter, reading: WeightsReading, folded: FoldedScales | None
    ) -> AdapterParts:
        """Make the parts as they act on this base, in the engine's order of rows."""
        weights = self._base_weights
        if folded is not None and weights is not None:
            weights = OriginalWeights(weights, folded)
        made = make_parts(found, reading.tensors(), weights)
        if folded is not None:
            made = rescaled(made, folded)
        return in_engine_order(made, self._base)

    def _check_size(self, layout: AdapterLayout) -> None:
        num_bytes = layout.num_elements * self._packing.dtype.itemsize
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise AdapterRefused(
                RefusalCode.TOO_LARGE,
                f"The adapter takes {num_bytes} bytes, and the page pool has {self._max_bytes}.",
                fix="Give the pool more memory (--device-memory), or train a lower rank.",
            )

    def _make_ready(self, layout: AdapterLayout) -> None:
        """Has a buffer of this size allocated and freed, which the next load finds ready.

        torch keeps freed pinned memory, and pinning takes as long as a load.
        """
        if self._workers.num_threads > 1:
            self._workers.start(
                partial(self._packing.allocate, layout.num_elements, self._packing.dtype)
            )

    def _start_packing(
        self,
        made: AdapterParts,
        reading: WeightsReading,
        prepared: Callable[[], _OpenImage],
    ) -> list[Callable[[], _PackedPart]]:
        """Start to pack the adapter in several parts, once all bytes are read."""

        def pack(modules: Sequence[LoraModule], extras: Sequence[ExtraTensor]) -> _PackedPart:
            reading.wait()
            image = prepared()
            began = time.perf_counter()
            maxima = [image.write(module) for module in modules]
            largest = [write_extra(image.layout.extras, image.buffer, part) for part in extras]
            return _PackedPart(maxima, largest, began, time.perf_counter())

        cuts = _cut(made.modules, made.extras, self._workers.num_threads * _PARTS_PER_THREAD)
        return [self._workers.start(partial(pack, *part)) for part in cuts]


@dataclass(frozen=True, slots=True)
class _OpenImage:
    """The buffer of an image that is being written."""

    layout: AdapterLayout
    buffer: torch.Tensor
    write: ModuleWriter


@dataclass(frozen=True, slots=True)
class _PackedPart:
    maxima: list[RankMaxima]
    extras: list[float]
    """The largest absolute value of each extra."""
    began: float
    ended: float


def _prepare(packing: Packing, layout: AdapterLayout) -> _OpenImage:
    """Allocates the buffer of an image, and zeroes what holds no weights."""
    buffer = packing.allocate(layout.num_elements, packing.dtype)
    return _OpenImage(layout, buffer, packing.writer(layout, buffer))


def _check_complete(made: AdapterParts, layout: AdapterLayout) -> None:
    """Raise ValueError unless the parts are those that the layout has places for."""
    missing = layout.extras.places.keys() ^ {part.key for part in made.extras}
    if missing:
        raise ValueError(f"parts do not fit the plan (no weights of the base?): {sorted(missing)}")


def _cut(
    modules: Sequence[LoraModule], extras: Sequence[ExtraTensor], num_cuts: int
) -> list[tuple[Sequence[LoraModule], Sequence[ExtraTensor]]]:
    """Cuts modules and other parts into pieces of similar numbers."""
    size = -(-len(modules) // num_cuts) or 1
    cuts: list[tuple[Sequence[LoraModule], Sequence[ExtraTensor]]] = [
        (modules[start : start + size], ()) for start in range(0, len(modules), size)
    ]
    size = -(-len(extras) // num_cuts) or 1
    cuts += [((), extras[start : start + size]) for start in range(0, len(extras), size)]
    return cuts
