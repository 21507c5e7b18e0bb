"""Tables of the resident adapters' extras, in tensors that kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto

import numpy as np
import torch

from loramux.adapters.packed import extras as parts
from loramux.adapters.packed.extras import MODEL_LEVEL, ExtraKey, ExtraKind, RowsPlace
from loramux.errors import DoesNotFit
from loramux.kernels.gpu.extras import tables as names
from loramux.kernels.gpu.extras.tables import (
    MATRIX_WORDS,
    MAX_HEAD_RANK,
    NO_VECTOR,
    NUM_MODEL_MATRICES,
    VECTOR_WORDS,
    Entries,
    Ints,
    LayerNumbers,
    SlotEntry,
)
from loramux.kernels.gpu.lora.work_list import (
    ALIGN_ELEMENTS,
    RankBlockDirectory,
    WorkListFull,
)
from loramux.kernels.gpu.transfer import send
from loramux.memory.records import ResidentAdapter
from loramux.types.model import LinearSpec
from loramux.types.request import Selection

MAX_ADAPTERS = 1024
# The heap has room for the pages of the pool several times, since free ranges may be scattered,
# and for token ids.
_WORDS_PER_PAGE = 4
_TOKEN_WORDS = 2**20

_NORM_VECTORS = {
    parts.ATTENTION_NORM: names.ATTENTION_NORM,
    parts.MLP_NORM: names.MLP_NORM,
}
_NORMS = (parts.ATTENTION_NORM, parts.MLP_NORM, parts.FINAL_NORM)
_TILED = (ExtraKind.WEIGHT, ExtraKind.ROWS, ExtraKind.LOW_RANK_A)
_MODEL_MATRICES = {
    (parts.EMBEDDING, ExtraKind.WEIGHT): names.EMBED_WEIGHT,
    (parts.EMBEDDING, ExtraKind.ROWS): names.EMBED_ROWS,
    (parts.EMBEDDING, ExtraKind.LOW_RANK_A): names.EMBED_A,
    (parts.EMBEDDING, ExtraKind.LOW_RANK_B): names.EMBED_B,
    (parts.HEAD, ExtraKind.WEIGHT): names.HEAD_WEIGHT,
    (parts.HEAD, ExtraKind.ROWS): names.HEAD_ROWS,
    (parts.HEAD, ExtraKind.LOW_RANK_A): names.HEAD_A,
    (parts.HEAD, ExtraKind.LOW_RANK_B): names.HEAD_B,
    (parts.HEAD, ExtraKind.GAIN): names.HEAD_GAIN,
    (parts.HEAD, ExtraKind.BIAS): names.HEAD_BIAS,
}


class ExtrasUse(IntFlag):
    """The extras that the adapters of a step have."""

    NONE = 0
    LINEARS = auto()
    """Gains and biases of fused linears."""
    NORMS = auto()
    WEIGHTS = auto()
    """Weights of projections."""
    EMBEDDING = auto()
    HEAD = auto()
    WIDE = auto()
    """A head with more rows than the base has tokens."""


@dataclass(frozen=True, slots=True)
class _Resident:
    slot: int
    uses: ExtrasUse
    has_matrices: bool
    """Whether tiles of its rows read weights: of projections or of the head."""
    head_rows: int


class DeviceExtras:
    """Slots of their own for adapters with such parts, in tensors at fixed addresses."""

    def __init__(
        self,
        linears: Sequence[LinearSpec],
        *,
        num_layers: int,
        vocab_size: int,
        num_pages: int,
        device: torch.device,
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        """num_pages: of the pool"""
        self._num_layers = num_layers
        self._vocab_size = vocab_size
        self.numbers = LayerNumbers(linears)
        num_vectors = num_layers * self.numbers.num_vectors + 1
        num_matrices = num_layers * self.numbers.num_matrices + NUM_MODEL_MATRICES
        num_words = _WORDS_PER_PAGE * num_pages + _TOKEN_WORDS
        self._ranges = RankBlockDirectory(max_slots=max_adapters, max_blocks=num_words)
        self.vectors = torch.full(
            (max_adapters, num_vectors, VECTOR_WORDS), NO_VECTOR, dtype=torch.int32, device=device
        )
        self.matrices = torch.zeros(
            (max_adapters, num_matrices, MATRIX_WORDS), dtype=torch.int32, device=device
        )
        self.heap = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._residents: dict[str, _Resident] = {}

    def __contains__(self, cid: str) -> bool:
        return cid in self._residents

    def add(self, adapter: ResidentAdapter) -> None:
        """Add an adapter with parts beside low rank; raise DoesNotFit when the tables are full.

        Its pages may still be written, but not moved.
        """
        layout = adapter.layout.extras
        first = layout.start // layout.page_width
        page_ids = adapter.page_ids[first : first + layout.num_pages]
        tokens = [place.token_ids for place in layout.places.values()]
        heap = np.array([*page_ids, *(t for ids in tokens for t in ids)], dtype=np.int32)
        _check_head(layout.places)
        try:
            slot, start = self._ranges.add(np.array([len(heap)], dtype=np.int32))
        except WorkListFull as error:
            raise DoesNotFit(
                f"No room for an adapter with DoRA, biases or weights of its own among "
                f"{len(self._residents)}: the device holds {len(self._ranges.slots)} of them. "
                "Evict one first."
            ) from error
        vectors, matrices = self._tabulate(adapter, start, len(page_ids))
        device = self.heap.device
        self.heap[start : start + len(heap)].copy_(send(torch.from_numpy(heap), device))
        self.vectors[slot].copy_(send(torch.from_numpy(vectors), device))
        self.matrices[slot].copy_(send(torch.from_numpy(matrices), device))
        self._residents[adapter.cid] = self._describe(slot, layout.places)

    def remove(self, cid: str) -> None:
        resident = self._residents.pop(cid, None)
        if resident is not None:
            self._ranges.remove(resident.slot)

    def uses(self, selections: Sequence[Selection]) -> ExtrasUse:
        """Return the parts that any adapter of these selections has."""
        found = ExtrasUse.NONE
        if self._residents:
            for selection in selections:
                for cid, _ in selection:
                    if (resident := self._residents.get(cid)) is not None:
                        found |= resident.uses
        return found

    def num_columns(self, selections: Sequence[Selection]) -> int:
        """Logits of a step: the vocabulary of the base, or the largest head of its adapters."""
        heads = (
            resident.head_rows
            for selection in selections
            for cid, _ in selection
            if (resident := self._residents.get(cid)) is not None
        )
        return max((self._vocab_size, *heads))

    def entries(self, selection: Selection) -> Entries:
        """Return the adapters of a selection that have such parts."""
        return tuple(
            SlotEntry(resident.slot, weight, resident.has_matrices)
            for cid, weight in selection
            if (resident := self._residents.get(cid)) is not None
        )

    def _tabulate(
        self, adapter: ResidentAdapter, heap_start: int, num_pages: int
    ) -> tuple[Ints, Ints]:
        """Return the rows of `vectors` and `matrices` of an adapter."""
        layout = adapter.layout.extras
        page_width = layout.page_width
        vectors = np.full(self.vectors.shape[1:], NO_VECTOR, dtype=np.int32)
        matrices = np.zeros(self.matrices.shape[1:], dtype=np.int32)
        tokens_at = heap_start + num_pages
        for (layer, module, kind), place in layout.places.items():
            page, rest = divmod(place.offset, page_width)
            assert rest % ALIGN_ELEMENTS == 0, "places are aligned"
            if kind in (ExtraKind.GAIN, ExtraKind.BIAS) and module != parts.HEAD:
                address = adapter.page_ids[page] * page_width + rest
                side = int(kind is ExtraKind.BIAS)
                vectors[self._vector(layer, module), side] = address // ALIGN_ELEMENTS
                continue
            pages = heap_start + page - layout.start // page_width
            size = (place.num_rows, place.width, place.rows_per_page)
            where = (rest // ALIGN_ELEMENTS, pages, tokens_at if place.token_ids else 0, 0, 0)
            matrices[self._matrix(layer, module, kind)] = *size, *where
            tokens_at += len(place.token_ids)
        return vectors, matrices

    def _vector(self, layer: int, module: str) -> int:
        if module == parts.FINAL_NORM:
            return self.numbers.vector(self._num_layers, 0)
        found = _NORM_VECTORS.get(module)
        return self.numbers.vector(
            layer, self.numbers.vector_of[module] if found is None else found
        )

    def _matrix(self, layer: int, module: str, kind: ExtraKind) -> int:
        if layer == MODEL_LEVEL:
            first = self._num_layers * self.numbers.num_matrices
            return first + _MODEL_MATRICES[module, kind]
        return self.numbers.matrix(layer, module)

    def _describe(self, slot: int, places: Mapping[ExtraKey, RowsPlace]) -> _Resident:
        uses = ExtrasUse.NONE
        for _, module, kind in places:
            uses |= _use_of(module, kind)
        head = places.get((MODEL_LEVEL, parts.HEAD, ExtraKind.WEIGHT))
        head_rows = 0 if head is None else head.num_rows
        if head_rows > self._vocab_size:
            uses |= ExtrasUse.WIDE
        has_matrices = any(
            kind in _TILED and module != parts.EMBEDDING for _, module, kind in places
        )
        return _Resident(slot, uses, has_matrices, head_rows)


def _use_of(module: str, kind: ExtraKind) -> ExtrasUse:
    if module == parts.EMBEDDING:
        return ExtrasUse.EMBEDDING
    if module == parts.HEAD:
        return ExtrasUse.HEAD
    if module in _NORMS:
        return ExtrasUse.NORMS
    return ExtrasUse.WEIGHTS if kind is ExtraKind.WEIGHT else ExtrasUse.LINEARS


def _check_head(places: Mapping[ExtraKey, RowsPlace]) -> None:
    low_rank = places.get((MODEL_LEVEL, parts.HEAD, ExtraKind.LOW_RANK_A))
    if low_rank is not None and low_rank.num_rows > MAX_HEAD_RANK:
        raise DoesNotFit(
            f"Its lm_head has rank {low_rank.num_rows}, and a GPU serves up to {MAX_HEAD_RANK} "
            "there. Serve with --device cpu, or save the merged lm_head with the adapter "
            "(modules_to_save)."
        )
