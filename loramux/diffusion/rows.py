"""Adds the adapters of each row to the outputs of one component, whose weights stay as they are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loramux.diffusion.adapter import LowRank, ModuleDelta, Modules
from loramux.diffusion.dora import add_dora
from loramux.diffusion.families.base import TokenRanges
from loramux.diffusion.targets import Target
from loramux.types.request import BASE_SELECTION, Selection

if TYPE_CHECKING:
    from loramux.diffusion.row_tables import RowTables

_Terms = tuple[tuple[ModuleDelta, float], ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """Neighbouring rows of one selection."""

    start: int
    stop: int
    selection: Selection


class RowLora:
    """The adapters of one component, and the selection of each row of its next forward.

    Each row's delta is computed from this row alone, so that it does not depend on the others.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._tables = _tables_of(net)
        self._adapters: dict[str, Modules] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._num_users: Counter[str] = Counter()
        self._num_rows: int | None = None
        self._spans: tuple[_Span, ...] = ()
        self._ranges: TokenRanges = {}

    @property
    def cids(self) -> Set[str]:
        return self._adapters.keys()

    def add(self, cid: str, modules: Modules) -> None:
        like = next(self._net.parameters())
        self._adapters[cid] = {
            path: pair.to(like.device, like.dtype) for path, pair in modules.items()
        }
        if self._tables is not None:
            self._tables.add(cid, self._adapters[cid])
        for path in modules:
            self._num_users[path] += 1
            if path not in self._hooks:
                module = self._net.get_submodule(path)
                self._hooks[path] = module.register_forward_hook(self._hook_of(path))

    def remove(self, cid: str) -> None:
        if self._tables is not None:
            self._tables.remove(cid)
        for path in self._adapters.pop(cid, {}):
            self._num_users[path] -= 1
            if not self._num_users[path]:
                del self._num_users[path]
                # Only this hook: transformers collects hidden states through hooks of its own.
                self._hooks.pop(path).remove()

    def set_rows(self, selections: Sequence[Selection], ranges: TokenRanges | None = None) -> None:
        """Set the selection of each row; equal ones should be neighbours, as they share a GEMM.

        `ranges`: the tokens of each row in modules whose input has no dimension of rows.
        """
        self._num_rows = len(selections)
        self._ranges = ranges or {}
        spans, start = [], 0
        for selection, group in groupby(selections):
            stop = start + len(list(group))
            if selection != BASE_SELECTION:
                spans.append(_Span(start, stop, selection))
            start = stop
        self._spans = tuple(spans)
        if self._tables is not None:
            self._tables.set_rows(selections, self._ranges)

    @property
    def tables(self) -> RowTables | None:
        """The adapters as tables on a GPU; None on a CPU."""
        return self._tables

    def warm_up(self) -> None:
        """Compiles what forwards need, so that no image waits for it."""
        if self._tables is not None:
            self._tables.warm_up()

    def set_all(self, selection: Selection) -> None:
        """Set one selection for all rows, however many there are."""
        self._num_rows = None
        self._ranges = {}
        self._spans = (_Span(0, 0, selection),) if selection else ()

    def _hook_of(self, path: str) -> Callable[[Any, tuple[Tensor, ...], Tensor], None]:
        def add_deltas(module: Target, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self._tables is not None and self._num_rows is not None:
                self._check_rows(path, inputs[0])
                if self._tables.add_deltas(path, inputs[0], output):
                    return
            for span in self._spans:
                terms = self._terms(path, span.selection, inputs[0].device)
                if terms:
                    start, stop = self._place(path, span, inputs[0])
                    x, y = inputs[0][start:stop], output[start:stop]
                    for delta, weight in terms:
                        _add(module, x, y, delta, weight)

        return add_deltas

    def _terms(self, path: str, selection: Selection, device: torch.device) -> _Terms:
        """Return the pairs of a module, on its device: an offloaded net comes there to work."""
        found = ((self._adapters.get(cid, {}).get(path), weight) for cid, weight in selection)
        return tuple((delta.on(device), weight) for delta, weight in found if delta is not None)

    def _place(self, path: str, span: _Span, inputs: Tensor) -> tuple[int, int]:
        """Return the part of the first dimension that has the rows of the span."""
        if self._num_rows is None:
            return 0, inputs.shape[0]
        self._check_rows(path, inputs)
        ranges = self._ranges.get(path)
        if ranges is None:
            return span.start, span.stop
        return ranges[span.start][0], ranges[span.stop - 1][1]

    def _check_rows(self, path: str, inputs: Tensor) -> None:
        first, ranges = inputs.shape[0], self._ranges.get(path)
        if ranges is None:
            assert first == self._num_rows, f"{path} has {first} rows, not {self._num_rows}"
        else:
            assert ranges[-1][1] == first, f"{path} has {first} tokens, not {ranges[-1][1]}"


def _tables_of(net: nn.Module) -> RowTables | None:
    """Return the tables for the GPU kernels; LORAMUX_KERNELS=triton interprets these, for tests."""
    if not next(net.parameters()).is_cuda and os.environ.get("LORAMUX_KERNELS") != "triton":
        return None
    # Imported here, as it needs Triton.
    from loramux.diffusion.row_tables import RowTables

    return RowTables(net)


def _add(module: Target, x: Tensor, y: Tensor, delta: ModuleDelta, weight: float) -> None:
    if isinstance(delta, LowRank) and delta.dora is not None:
        add_dora(module, x, y, delta, weight)  # DoRA is never part of a sum.
        return
    if delta.rank:
        y.add_(delta.outputs(module, x), alpha=weight)
    if delta.bias is not None:
        is_convolution = isinstance(module, nn.Conv2d)
        y.add_(delta.bias[:, None, None] if is_convolution else delta.bias, alpha=weight)
