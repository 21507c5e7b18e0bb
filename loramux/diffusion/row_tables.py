"""Tables of the adapters of each row on a GPU, from which kernels add their deltas."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loramux.diffusion.adapter import LowRank, Modules
from loramux.diffusion.families.base import TokenRanges
from loramux.kernels.gpu.lora.token_rows import (
    ALIGN_BYTES,
    MAX_RANKS,
    MIN_RANKS,
    WORDS,
    RowTerms,
    RowTokens,
    add_deltas,
)
from loramux.types.request import Selection

_MAX_KEPT = 16
_WARM_WIDTH = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Matrices:
    """Where the matrices of one adapter are."""

    places: np.ndarray[Any, np.dtype[np.int64]]
    """[modules, words]: addresses of A and B, the rank, and the address of the bias or 0.

    Zeros: the module stays unchanged.
    """
    is_aligned: np.ndarray[Any, np.dtype[np.bool_]]
    """[modules]"""
    others: frozenset[str]
    """Modules whose deltas the kernels cannot add."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The tables of one sequence of selections."""

    places: Tensor
    """int64 [modules, rows, terms, words]"""
    weights: Tensor
    """float32 [rows, terms]"""
    kinds: np.ndarray[Any, np.dtype[np.int64]]
    """[modules]: the largest rank, rounded up, and 1 more if a matrix is not aligned; 0: none."""
    terms: Mapping[str, RowTerms]
    """Module path -> its part of the tables; without one, no row changes there."""
    others: frozenset[str]
    """Modules whose deltas the kernels cannot add."""

    @property
    def layout(self) -> Hashable:
        """Steps of one layout launch the same kernels."""
        return self.places.shape, self.kinds.tobytes()

    def copy_from(self, step: Step) -> None:
        """Take over the adapters of a step of the same layout."""
        self.places.copy_(step.places)
        self.weights.copy_(step.weights)


class RowTables:
    """The adapters of the rows of one component, as tables on its device."""

    def __init__(self, net: nn.Module) -> None:
        like = next(net.parameters())
        self._device, self._dtype = like.device, like.dtype
        self._linears = [
            path for path, module in net.named_modules() if isinstance(module, nn.Linear)
        ]
        self._index = {path: number for number, path in enumerate(self._linears)}
        self._adapters: dict[str, _Matrices] = {}
        self._steps: dict[tuple[Selection, ...], Step] = {}
        self._step = self._make_step(())
        self._ranges: TokenRanges = {}
        self._tokens: dict[tuple[tuple[int, int], ...], RowTokens] = {}

    def add(self, cid: str, modules: Modules) -> None:
        """Note where the matrices of an adapter are; they stay there until `remove`."""
        places = np.zeros((len(self._linears), WORDS), dtype=np.int64)
        is_aligned = np.ones(len(self._linears), dtype=np.bool_)
        others = set()
        for path, pair in modules.items():
            index = self._index.get(path)
            if index is None or not isinstance(pair, LowRank) or pair.dora is not None:
                others.add(path)
            else:
                bias = 0 if pair.bias is None else pair.bias.data_ptr()
                places[index] = (pair.a.data_ptr(), pair.b.data_ptr(), pair.rank, bias)
                is_aligned[index] = _is_aligned(pair)
        self._adapters[cid] = _Matrices(places, is_aligned, frozenset(others))
        self._steps.clear()

    def remove(self, cid: str) -> None:
        del self._adapters[cid]
        self._steps.clear()

    def set_rows(self, selections: Sequence[Selection], ranges: TokenRanges) -> None:
        """Set the selection of each row of the next forward."""
        key = tuple(selections)
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _MAX_KEPT:
                self._steps.clear()
            step = self._steps[key] = self._make_step(key)
        self._step, self._ranges = step, ranges

    @property
    def step(self) -> Step | None:
        """The tables of the next forward, if they say all about it."""
        return None if self._ranges or self._step.others else self._step

    @contextlib.contextmanager
    def using(self, step: Step) -> Iterator[None]:
        """Lets forwards take other tables."""
        kept, self._step = self._step, step
        try:
            yield
        finally:
            self._step = kept

    def copy_of(self, step: Step) -> Step:
        """Return tables of the same layout with memory of their own."""
        places, weights = step.places.clone(), step.weights.clone()
        return self._step_of(places, weights, step.kinds, step.others)

    def add_deltas(self, path: str, x: Tensor, y: Tensor) -> bool:
        """Add the deltas of one module to its output; return False if the kernels cannot."""
        if path in self._step.others or not y.is_contiguous():
            return False
        terms = self._step.terms.get(path)
        if terms is not None:
            ranges = self._ranges.get(path)
            add_deltas(x, y, terms, None if ranges is None else self._tokens_of(tuple(ranges)))
        return True

    def warm_up(self) -> None:
        """Compiles the kernels, so that no image waits for it."""
        zeros = {"dtype": self._dtype, "device": self._device}
        x = torch.zeros(1, 1, _WARM_WIDTH, **zeros)  # type: ignore[call-overload]
        y = torch.zeros_like(x)
        ranks = MIN_RANKS
        while ranks <= MAX_RANKS:
            pair = LowRank(x.new_zeros(ranks, _WARM_WIDTH), x.new_zeros(_WARM_WIDTH, ranks))
            place = [[[pair.a.data_ptr(), pair.b.data_ptr(), ranks, 0]]]
            places = torch.tensor(place, dtype=torch.int64, device=self._device)
            weights = torch.ones(1, 1, device=self._device)
            add_deltas(x, y, RowTerms(places, weights, ranks, is_aligned=True))
            ranks *= 2

    def _make_step(self, selections: Sequence[Selection]) -> Step:
        num_terms = max(map(len, selections), default=0)
        num_modules = len(self._linears)
        places = np.zeros((num_modules, len(selections), num_terms, WORDS), dtype=np.int64)
        weights = np.zeros((len(selections), num_terms), dtype=np.float32)
        is_aligned = np.ones(num_modules, dtype=np.bool_)
        others: set[str] = set()
        for row, selection in enumerate(selections):
            for term, (cid, weight) in enumerate(selection):
                weights[row, term] = weight
                found = self._adapters.get(cid)
                # Without one, the adapter changes other components only.
                if found is not None:
                    places[:, row, term] = found.places
                    is_aligned &= found.is_aligned
                    others |= found.others
        # A bias alone needs a launch, too.
        ranks = np.maximum(places[..., 2], places[..., 3] != 0).max(axis=(1, 2), initial=0)
        return self._step_of(
            torch.from_numpy(places).to(self._device),
            torch.from_numpy(weights).to(self._device),
            _round_up(ranks) + ((ranks > 0) & ~is_aligned),
            frozenset(others),
        )

    def _step_of(
        self,
        places: Tensor,
        weights: Tensor,
        kinds: np.ndarray[Any, np.dtype[np.int64]],
        others: frozenset[str],
    ) -> Step:
        terms = {
            self._linears[index]: RowTerms(
                places[index],
                weights,
                int(kinds[index]) // 2 * 2,
                is_aligned=bool(kinds[index] % 2 == 0),
            )
            for index in kinds.nonzero()[0].tolist()
        }
        return Step(places, weights, kinds, terms, others)

    def _tokens_of(self, ranges: tuple[tuple[int, int], ...]) -> RowTokens:
        found = self._tokens.get(ranges)
        if found is None:
            assert all(before[1] == after[0] for before, after in pairwise(ranges)), "a gap"
            starts = [ranges[0][0], *(stop for _, stop in ranges)]
            on_device = torch.tensor(starts, dtype=torch.int32, device=self._device)
            if len(self._tokens) >= _MAX_KEPT:
                self._tokens.clear()
            most = max(stop - start for start, stop in ranges)
            found = self._tokens[ranges] = RowTokens(on_device, most)
        return found


def _round_up(ranks: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Round ranks up to those that the kernels compute anyway, so that fewer layouts differ."""
    powers = 2 ** np.ceil(np.log2(np.maximum(ranks, MIN_RANKS))).astype(np.int64)
    multiples = -(-ranks // MAX_RANKS) * MAX_RANKS
    rounded = np.where(ranks <= MAX_RANKS, powers, multiples)
    return np.where(ranks > 0, rounded, 0)


def _is_aligned(pair: LowRank) -> bool:
    """Whether every row of both matrices begins at a multiple of 16 bytes."""
    strides = (matrix.shape[-1] * matrix.itemsize for matrix in (pair.a, pair.b))
    starts = (matrix.data_ptr() for matrix in (pair.a, pair.b))
    return all(value % ALIGN_BYTES == 0 for value in (*strides, *starts))
