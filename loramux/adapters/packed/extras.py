"""Parts of an adapter beside the low rank of its linears, and their place in its pages.

A part is a matrix of rows in the dtype of the base. A row does not cross a page boundary. The parts
follow the low-rank weights, from a page boundary on, in the same places on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from loramux.errors import DoesNotFit

MODEL_LEVEL = -1
"""The layer of modules that are outside the decoder layers."""
EMBEDDING, HEAD = "embed_tokens", "lm_head"
ATTENTION_NORM, MLP_NORM, FINAL_NORM = "attention_norm", "mlp_norm", "final_norm"
# Matrices begin at multiples of so many elements, the unit of addresses in the device's directory.
ALIGN_ELEMENTS = 64


class ExtraKind(StrEnum):
    """What a part computes; y is the output of its module and x the input.

    The module of GAIN and BIAS is a fused linear (qkv, o, gate_up, down), with zeros in the columns
    of projections that the adapter does not change; a norm (GAIN only); or the head, where the
    vector is stored as [vocabulary, 1].
    The module of WEIGHT is a projection (q_proj, ...), the embedding or the head.
    """

    GAIN = "gain"
    """y += gain * y, before the low rank is added: DoRA, IA3, retrained norms. [1, out]"""
    BIAS = "bias"
    """y += bias. [1, out]"""
    WEIGHT = "weight"
    """Replaces the weight; the bias of the base is still added. [out, in]; the embedding and the
    head may have more rows than the base has tokens."""
    LOW_RANK_A = "low_rank_a"
    """Low rank of the head: [rank, hidden]; of the embedding: [vocabulary, rank]."""
    LOW_RANK_B = "low_rank_b"
    """With the scale. Head: [vocabulary, rank]; embedding: [rank, hidden]."""
    DORA = "dora"
    """How DoRA scales the rows of a module of an image model: [3 * out, 1]."""
    KRONECKER = "kronecker"
    """The two factors of a module of an image model, one after the other. [elements, 1]"""
    ROWS = "rows"
    """Replaces the rows `token_ids` of the weight of the embedding or the head. [tokens, hidden]"""


ExtraKey = tuple[int, str, ExtraKind]
"""(layer or MODEL_LEVEL, module, kind)"""


@dataclass(frozen=True, slots=True)
class ExtraSpec:
    """The shape of a part, which follows from the config and the header of the weights."""

    layer: int
    module: str
    kind: ExtraKind
    num_rows: int
    width: int
    token_ids: tuple[int, ...] = ()
    """The token of each row of ROWS, ascending."""
    shape: tuple[int, ...] = ()
    """Rows and columns of the first factor of KRONECKER, rows of the second, rows to skip."""

    @property
    def key(self) -> ExtraKey:
        return self.layer, self.module, self.kind


@dataclass(frozen=True, slots=True)
class RowsPlace:
    """Rows of `width` elements; those of a matrix over several pages fill each from its start."""

    offset: int
    """The offset of row 0, in elements of the adapter's buffer."""
    num_rows: int
    width: int
    rows_per_page: int
    token_ids: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def pieces(self, page_width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first row, number of rows, offset) of the rows in each page."""
        for number, start in enumerate(range(0, self.num_rows, self.rows_per_page)):
            count = min(self.rows_per_page, self.num_rows - start)
            yield start, count, self.offset + number * page_width


@dataclass(frozen=True, slots=True)
class ExtrasLayout:
    """The places of all extras; adapters with equal keys have equal layouts."""

    places: Mapping[ExtraKey, RowsPlace] = field(default_factory=dict)
    page_width: int = 0
    """Elements of a page in the dtype of the image."""
    start: int = 0
    """First element, at a page boundary; the low-rank weights end before it."""
    num_pages: int = 0
    num_weights: int = 0
    """Elements that hold weights; the others are padding."""
    gaps: tuple[tuple[int, int], ...] = ()
    """(start, stop) of the elements without weights, from `start` on."""
    specs: tuple[ExtraSpec, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_pages * self.page_width

    @property
    def key(self) -> tuple[tuple[Any, ...], ...]:
        """Values that JSON can hold, from which `specs_of` makes the specs again."""
        return tuple(
            (s.layer, s.module, str(s.kind), s.num_rows, s.width, s.token_ids)
            + ((s.shape,) if s.shape else ())
            for s in self.specs
        )


NO_EXTRAS = ExtrasLayout()


def specs_of(key: Iterable[Sequence[Any]]) -> tuple[ExtraSpec, ...]:
    """Return the specs of an ExtrasLayout.key, which may come from a file."""
    return tuple(
        ExtraSpec(layer, module, ExtraKind(kind), num_rows, width, *map(tuple, lists))
        for layer, module, kind, num_rows, width, *lists in key
    )


def num_tokens_of(specs: Iterable[ExtraSpec], module: str) -> int | None:
    """Return the rows of a full embedding or head; None if the adapter has the base's."""
    for spec in specs:
        if spec.kind is ExtraKind.WEIGHT and spec.module == module:
            return spec.num_rows
    return None


def plan_extras(specs: Sequence[ExtraSpec], *, num_elements: int, page_width: int) -> ExtrasLayout:
    """Places the parts after `num_elements` elements of low-rank weights.

    Raises DoesNotFit for a row that is larger than a page.
    """
    if not specs:
        return NO_EXTRAS
    first_page = -(-num_elements // page_width)
    pages = _OpenPages(page_width, first_page)
    places: dict[ExtraKey, RowsPlace] = {}
    # The largest first, so that small ones fill the ends of pages.
    for spec in sorted(specs, key=lambda s: (-s.num_rows * s.width, s.key)):
        rows_per_page = page_width // spec.width
        if rows_per_page == 0:
            raise DoesNotFit(
                f"A row of {spec.module} of an adapter has {spec.width} elements, and a page has "
                f"{page_width}. Serve with a larger block size."
            )
        offset = pages.place(spec.num_rows, spec.width)
        places[spec.key] = RowsPlace(
            offset,
            spec.num_rows,
            spec.width,
            min(rows_per_page, spec.num_rows),
            spec.token_ids,
            spec.shape,
        )
    start = first_page * page_width
    taken = [
        (offset, offset + count * place.width)
        for place in places.values()
        for _, count, offset in place.pieces(page_width)
    ]
    end = pages.next_page * page_width
    bounds = [(start, start), *sorted(taken), (end, end)]
    return ExtrasLayout(
        places={spec.key: places[spec.key] for spec in specs},
        page_width=page_width,
        start=start,
        num_pages=pages.next_page - first_page,
        num_weights=sum(spec.num_rows * spec.width for spec in specs),
        gaps=tuple((a, b) for (_, a), (b, _) in pairwise(bounds) if a < b),
        specs=tuple(specs),
    )


class _OpenPages:
    """Places matrices: over whole new pages, or into the first page with room."""

    def __init__(self, page_width: int, first_page: int) -> None:
        self._page_width = page_width
        self.next_page = first_page
        # Page number and first free element.
        self._open: list[list[int]] = []

    def place(self, num_rows: int, width: int) -> int:
        rows_per_page = self._page_width // width
        if num_rows > rows_per_page:
            offset = self.next_page * self._page_width
            self.next_page += -(-num_rows // rows_per_page)
            rest = (num_rows - 1) % rows_per_page + 1
            self._add_open(self.next_page - 1, rest * width)
            return offset
        needed = num_rows * width
        for entry in self._open:
            if entry[1] + needed <= self._page_width:
                offset = entry[0] * self._page_width + entry[1]
                entry[1] = _align(entry[1] + needed)
                return offset
        offset = self.next_page * self._page_width
        self.next_page += 1
        self._add_open(self.next_page - 1, needed)
        return offset

    def _add_open(self, page: int, used: int) -> None:
        if _align(used) < self._page_width:
            self._open.append([page, _align(used)])


def _align(num_elements: int) -> int:
    return -(-num_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
