"""CUDA graphs of a denoiser's forward: one for each shape of its inputs and layout of adapters."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from loramux.diffusion.row_tables import RowTables, Step
from loramux.memory.device import GraphMaker, release_cached, wait_for

# A capture costs two forwards, and a shape that is seen so often comes again.
_RUNS_BEFORE_CAPTURE = 3
_MAX_GRAPHS = 16
_MAX_SEEN = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    step: Step
    outputs: list[Any]
    """Its last element is what the forward returned; a replay writes its tensors."""


class ForwardGraphs:
    """Replays forwards of a net whose inputs have been seen before in other values.

    Adapters are data of a graph, so that requests with others, and new ones, use it too.
    """

    def __init__(self, net: nn.Module, tables: RowTables) -> None:
        self._net = net
        self._tables = tables
        self._device = next(net.parameters()).device
        self._maker = GraphMaker(self._device)
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._num_seen: Counter[Hashable] = Counter()
        self._without: set[Hashable] = set()
        """The inputs whose forwards cannot be captured."""
        self.num_replays = 0

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Replace the forward of the net."""
        forward = self._net.forward

        @wraps(forward)
        def replay_or_run(*args: Any, **kwargs: Any) -> Any:
            return self._run(forward, args, kwargs)

        self._net.forward = replay_or_run
        try:
            yield
        finally:
            del self._net.forward

    def _run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        step = self._tables.step
        if step is None:
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (repr(spec), tuple(map(_kind_of, leaves)), step.layout)
        graph = self._graphs.get(key)
        if graph is None and self._is_due(key):
            graph = self._capture(key, forward, leaves, spec)
        if graph is None:
            return forward(*args, **kwargs)
        self._graphs.move_to_end(key)
        graph.step.copy_from(step)
        for held, given in zip(graph.inputs, _tensors(leaves), strict=True):
            held.copy_(given)
        graph.replay()
        self.num_replays += 1
        # The next replay overwrites the output of this one.
        return pytree.tree_map_only(Tensor, torch.clone, graph.outputs[-1])

    def _is_due(self, key: Hashable) -> bool:
        if key in self._without:
            return False
        if len(self._num_seen) >= _MAX_SEEN:
            self._num_seen.clear()
        self._num_seen[key] += 1
        return self._num_seen[key] > _RUNS_BEFORE_CAPTURE

    def _capture(
        self,
        key: Hashable,
        forward: Callable[..., Any],
        leaves: list[Any],
        spec: pytree.TreeSpec,
    ) -> _Graph | None:
        """Capture a forward; return None, for ever, if there is no memory for it."""
        # A graph is not freed while it runs.
        wait_for(self._device)
        while len(self._graphs) >= _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        step = self._tables.step
        assert step is not None, "no tables to capture"
        held = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(held, spec)
        own = self._tables.copy_of(step)
        outputs: list[Any] = []

        def work() -> None:
            outputs[:] = [forward(*args, **kwargs)]

        # The graph has memory of its own, beside what torch keeps for other forwards.
        release_cached(self._device)
        try:
            with self._tables.using(own):
                replay = self._maker.make(work)
        except RuntimeError as error:
            _log.warning("forwards of this shape run without a CUDA graph: %s", error)
            self._without.add(key)
            return None
        graph = _Graph(replay, tuple(_tensors(held)), own, outputs)
        self._graphs[key] = graph
        return graph


def _kind_of(leaf: Any) -> Hashable:
    """Return what of an input a graph has fixed: shape and type of a tensor, the value
    of another.
    """
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
