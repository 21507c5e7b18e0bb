"""Extras of a step's adapters, computed with torch ops on the rows that use them.

Rows without such parts are not touched, and steps without them do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.adapters.packed.extras import (
    EMBEDDING,
    HEAD,
    MODEL_LEVEL,
    ExtraKey,
    ExtraKind,
    ExtrasLayout,
    RowsPlace,
)
from loramux.kernels.linear import LinearMethod, linear
from loramux.lora.batch import RowRun
from loramux.memory.pool import PageView
from loramux.memory.records import ResidentAdapter
from loramux.types.model import LinearSpec
from loramux.types.request import Selection

SiteKey = tuple[int, str]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A matrix whose rows are in pages of the pool."""

    pieces: tuple[Tensor, ...]
    """Views [rows, width]; all but the last have `rows_per_piece` rows."""
    rows_per_piece: int
    token_ids: Tensor | None
    """The token of each row of ROWS, ascending."""

    @property
    def num_rows(self) -> int:
        return (len(self.pieces) - 1) * self.rows_per_piece + self.pieces[-1].shape[0]

    @property
    def vector(self) -> Tensor:
        """The values of a matrix of one row."""
        return self.pieces[0][0]

    def take(self, rows: Tensor) -> Tensor:
        """Copy the rows of these indices: [indices, width]."""
        if len(self.pieces) == 1:
            return self.pieces[0].index_select(0, rows)
        out = self.pieces[0].new_empty(rows.shape[0], self.pieces[0].shape[1])
        numbers, offsets = rows // self.rows_per_piece, rows % self.rows_per_piece
        for number in sorted(set(numbers.tolist())):
            members = (numbers == number).nonzero().squeeze(1)
            out[members] = self.pieces[number].index_select(0, offsets[members])
        return out

    def multiply_into(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """out[:, i] = x @ row i + bias[i]; x [tokens, width], out [tokens, rows]"""
        start = 0
        for piece in self.pieces:
            stop = start + piece.shape[0]
            out[:, start:stop] = linear(x, piece, None if bias is None else bias[start:stop])
            start = stop


class AdapterViews:
    """Views of the parts of one resident adapter."""

    def __init__(self, adapter: ResidentAdapter, pages: PageView) -> None:
        self.adapter = adapter
        layout = adapter.layout.extras
        self.parts = {
            key: _view_rows(place, layout, adapter.page_ids, pages.storage)
            for key, place in layout.places.items()
        }

    def get(self, layer: int, module: str, kind: ExtraKind) -> PagedRows | None:
        return self.parts.get((layer, module, kind))


def _view_rows(
    place: RowsPlace, layout: ExtrasLayout, page_ids: Sequence[int], storage: Tensor
) -> PagedRows:
    size = layout.page_width
    pieces = []
    for _, count, offset in place.pieces(size):
        number, start = divmod(offset, size)
        page = storage[page_ids[number]]
        pieces.append(page[start : start + count * place.width].view(count, place.width))
    token_ids = torch.tensor(place.token_ids, device=storage.device) if place.token_ids else None
    return PagedRows(tuple(pieces), place.rows_per_page, token_ids)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Adjacent rows of one selection, with the views of those of its adapters that have parts."""

    rows: slice
    members: tuple[tuple[AdapterViews, float], ...]

    def parts(self, layer: int, module: str, kind: ExtraKind) -> list[tuple[PagedRows, float]]:
        return [
            (found, weight)
            for views, weight in self.members
            if (found := views.get(layer, module, kind)) is not None
        ]


class ExtrasSource:
    """Views of the resident adapters that recent steps used."""

    def __init__(
        self,
        pages: PageView,
        adapters: Mapping[str, ResidentAdapter],
        linears: Sequence[LinearSpec],
        *,
        num_layers: int,
    ) -> None:
        self.num_layers = num_layers
        self.columns = {linear.name: linear.columns for linear in linears}
        """The output columns of each projection of a linear."""
        self._pages = pages
        self._adapters = adapters
        self._views: dict[str, AdapterViews] = {}

    def gather(self, selections: Iterable[Selection]) -> dict[str, AdapterViews]:
        """Return the views of those adapters of the selections that have parts."""
        cids = dict.fromkeys(cid for selection in selections for cid, _ in selection)
        found = {}
        for cid in cids:
            adapter = self._adapters[cid]
            if not adapter.layout.extras.specs:
                continue
            views = self._views.get(cid)
            if views is None or views.adapter is not adapter:
                views = AdapterViews(adapter, self._pages)
            found[cid] = views
        self._views = found
        return found


class StepExtras:
    """The parts of the adapters of one step, by the rows that use them."""

    def __init__(
        self, source: ExtrasSource, views: Mapping[str, AdapterViews], runs: Sequence[RowRun]
    ) -> None:
        self._source = source
        self._views = views
        self._selections = {
            row: run.selection for run in runs for row in range(run.start, run.stop)
        }
        self._groups = self._group_runs(runs)
        self._modules = {key[:2] for one in views.values() for key in one.parts}

    @classmethod
    def of(cls, source: ExtrasSource, runs: Sequence[RowRun]) -> StepExtras | None:
        """Return the parts of a step; None if none of its adapters has any."""
        views = source.gather(run.selection for run in runs)
        return cls(source, views, runs) if views else None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Limits the following calls to the given rows, which are renumbered 0, 1, .."""
        self._groups = self._groups_of(rows)

    def at_rows(self, rows: Sequence[int]) -> StepExtras:
        """Return the parts of the given rows alone, which are renumbered 0, 1, .."""
        found = copy(self)
        found.keep_rows(rows)
        return found

    def changes_linear(self, site: SiteKey) -> bool:
        """Whether a part of these adapters changes the fused linear."""
        layer, name = site
        modules = self._modules
        return site in modules or any((layer, p) in modules for p in self._source.columns[name])

    def change_linear(self, site: SiteKey, linear: LinearMethod, x: Tensor, y: Tensor) -> None:
        """Change y = linear(x) in place, before low rank is added to it."""
        layer, name = site
        if not self.changes_linear(site):
            return
        for group in self._groups:
            mine = y[group.rows]
            for projection, columns in self._source.columns[name].items():
                for full, _ in group.parts(layer, projection, ExtraKind.WEIGHT):
                    bias = linear.bias
                    own = None if bias is None else bias[columns]
                    full.multiply_into(x[group.rows], mine[:, columns], own)
            _scale_add(mine, group, layer, name)

    def change_norm(self, layer: int, name: str, normed: Tensor) -> None:
        """Change the output of a norm in place."""
        if (layer, name) in self._modules:
            for group in self._groups:
                _scale_add(normed[group.rows], group, layer, name)

    def base_tokens(self, token_ids: Tensor) -> Tensor:
        """Return tokens that the base has; `change_embedding` replaces those that it lacks."""
        if not self.vocab_sizes(EMBEDDING):
            return token_ids
        replaced = torch.zeros_like(token_ids, dtype=torch.bool)
        for group in self._groups:
            if group.parts(MODEL_LEVEL, EMBEDDING, ExtraKind.WEIGHT):
                replaced[group.rows] = True
        return token_ids.masked_fill(replaced, 0)

    def change_embedding(self, embedded: Tensor, token_ids: Tensor, scale: float) -> None:
        """Change the base's embeddings in place; `scale` is the model's factor on embeddings."""
        if (MODEL_LEVEL, EMBEDDING) in self._modules:
            for group in self._groups:
                _change_embedding(embedded[group.rows], token_ids[group.rows], group, scale)

    def vocab_sizes(self, module: str) -> list[int]:
        """Return the numbers of tokens of the full embeddings or heads of these adapters."""
        key: ExtraKey = (MODEL_LEVEL, module, ExtraKind.WEIGHT)
        return [one.parts[key].num_rows for one in self._views.values() if key in one.parts]

    def logits(
        self,
        hidden: Tensor,
        rows: Sequence[int],
        head: Callable[[Tensor], Tensor],
        cap: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute the logits [rows, vocabulary] in float32.

        `rows` are the rows of the step that `hidden` [rows, hidden] belongs to; `head` computes the
        logits of the base and `cap` its softcap. The vocabulary is the largest of these rows;
        tokens that a row does not have are -inf.
        """
        logits = head(hidden)
        if (MODEL_LEVEL, HEAD) not in self._modules:
            return cap(logits)
        num_base = logits.shape[1]
        num_tokens = max(num_base, *self.vocab_sizes(HEAD), 0)
        logits = F.pad(logits, (0, num_tokens - num_base))
        sizes = torch.full((logits.shape[0], 1), num_base, device=logits.device)
        for group in self._groups_of(rows):
            _change_logits(logits[group.rows], hidden[group.rows], group)
            for full, _ in group.parts(MODEL_LEVEL, HEAD, ExtraKind.WEIGHT):
                sizes[group.rows] = full.num_rows
        # After the cap, which would make a finite number of -inf.
        lacking = torch.arange(num_tokens, device=logits.device) >= sizes
        return cap(logits).masked_fill_(lacking, -torch.inf)

    def _groups_of(self, rows: Sequence[int]) -> list[RowGroup]:
        runs = [RowRun(self._selections[row], index, index + 1) for index, row in enumerate(rows)]
        return self._group_runs(runs)

    def _group_runs(self, runs: Sequence[RowRun]) -> list[RowGroup]:
        groups = []
        for selection, same in groupby(runs, key=attrgetter("selection")):
            members = tuple(
                (self._views[cid], weight) for cid, weight in selection if cid in self._views
            )
            first, *others = same
            stop = others[-1].stop if others else first.stop
            if members:
                groups.append(RowGroup(slice(first.start, stop), members))
        return groups


def _scale_add(y: Tensor, group: RowGroup, layer: int, module: str) -> None:
    """y += gain * y + bias, with the sums over the adapters of the rows."""
    gain = _weighted(group.parts(layer, module, ExtraKind.GAIN))
    bias = _weighted(group.parts(layer, module, ExtraKind.BIAS))
    if gain is not None:
        y.addcmul_(y, gain)
    if bias is not None:
        y.add_(bias)


def _weighted(parts: Sequence[tuple[PagedRows, float]]) -> Tensor | None:
    total: Tensor | None = None
    for rows, weight in parts:
        vector = rows.vector if weight == 1 else rows.vector * weight
        total = vector if total is None else total + vector
    return total


def _change_embedding(out: Tensor, token_ids: Tensor, group: RowGroup, scale: float) -> None:
    for full, _ in group.parts(MODEL_LEVEL, EMBEDDING, ExtraKind.WEIGHT):
        out.copy_(full.take(token_ids) * scale)
    for rows, _ in group.parts(MODEL_LEVEL, EMBEDDING, ExtraKind.ROWS):
        assert rows.token_ids is not None, "rows have tokens"
        places = torch.searchsorted(rows.token_ids, token_ids).clamp_(max=len(rows.token_ids) - 1)
        hits = (rows.token_ids[places] == token_ids).nonzero().squeeze(1)
        out[hits] = rows.take(places[hits]) * scale
    for a, weight in group.parts(MODEL_LEVEL, EMBEDDING, ExtraKind.LOW_RANK_A):
        b = _partner(group, a, EMBEDDING)
        known = token_ids.clamp(max=a.num_rows - 1)
        delta = a.take(known) @ _whole(b)
        out += delta * (scale * weight) * (token_ids < a.num_rows).unsqueeze(1)


def _change_logits(logits: Tensor, hidden: Tensor, group: RowGroup) -> None:
    for full, _ in group.parts(MODEL_LEVEL, HEAD, ExtraKind.WEIGHT):
        full.multiply_into(hidden, logits)
    for rows, _ in group.parts(MODEL_LEVEL, HEAD, ExtraKind.ROWS):
        assert rows.token_ids is not None, "rows have tokens"
        replaced = logits.new_empty(logits.shape[0], rows.num_rows)
        rows.multiply_into(hidden, replaced)
        logits[:, rows.token_ids] = replaced
    total: Tensor | None = None
    for a, weight in group.parts(MODEL_LEVEL, HEAD, ExtraKind.LOW_RANK_A):
        b = _partner(group, a, HEAD)
        delta = logits.new_empty(logits.shape[0], b.num_rows)
        b.multiply_into(linear(hidden, _whole(a)) * weight, delta)
        total = delta if total is None else total + delta
    gain = _weighted_column(group, ExtraKind.GAIN)
    bias = _weighted_column(group, ExtraKind.BIAS)
    if gain is not None:
        own = logits[:, : gain.shape[0]]
        own.addcmul_(own, gain)
    if bias is not None:
        logits[:, : bias.shape[0]] += bias
    if total is not None:
        logits[:, : total.shape[1]] += total


def _weighted_column(group: RowGroup, kind: ExtraKind) -> Tensor | None:
    """Return the sum of vectors over the vocabulary, which are stored as columns, in float32."""
    total: Tensor | None = None
    for rows, weight in group.parts(MODEL_LEVEL, HEAD, kind):
        column = _whole(rows)[:, 0].float() * weight
        total = column if total is None else total + column
    return total


def _partner(group: RowGroup, a: PagedRows, module: str) -> PagedRows:
    """Return the LOW_RANK_B of the adapter that this LOW_RANK_A belongs to."""
    for views, _ in group.members:
        if views.get(MODEL_LEVEL, module, ExtraKind.LOW_RANK_A) is a:
            return views.parts[MODEL_LEVEL, module, ExtraKind.LOW_RANK_B]
    raise AssertionError("LOW_RANK_A without LOW_RANK_B")


def _whole(rows: PagedRows) -> Tensor:
    return rows.pieces[0] if len(rows.pieces) == 1 else torch.cat(rows.pieces)
