"""Edges of a captured graph, by the driver's C interface.

A kernel that waits by itself for the one ahead of it may be launched earlier: when all programs of
that one have begun, and not when they have ended. Our kernels tell those behind them when; a
library's do not, so the edges that lead away from them are changed. What such a kernel reads
before it waits was complete when the library's began, as before.
"""

from __future__ import annotations

import ctypes
from typing import Any

_KERNEL = 0
_ON_TRIGGER, _ON_BEGIN = 1, 2
_PROGRAMMATIC = 1
# How a library's products are named, of the kind for Hopper and later.
_LIBRARY_NAMES = (b"nvjet",)


class DriverError(RuntimeError):
    pass


class _Edge(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class GraphEdges:
    def __init__(self, driver: Any, graph: int) -> None:
        """driver: as ctypes loads it   graph: its address"""
        self._driver = driver
        self._graph = ctypes.c_void_p(graph)
        self._names: dict[int, bytes] = {}

    def begin_with_products(self) -> int:
        """Kernels behind a library's product are launched with it; how many. They wait for it."""
        count = 0
        for source, target, edge in self._edges():
            is_ours = edge.type == _PROGRAMMATIC and edge.from_port == _ON_TRIGGER
            if is_ours and self._name(source).startswith(_LIBRARY_NAMES):
                self._change("cuGraphRemoveDependencies_v2", source, target, edge)
                edge.from_port = _ON_BEGIN
                self._change("cuGraphAddDependencies_v2", source, target, edge)
                count += 1
        return count

    def _edges(self) -> list[tuple[int, int, _Edge]]:
        count = ctypes.c_size_t()
        self._call("cuGraphGetEdges_v2", self._graph, None, None, None, ctypes.byref(count))
        sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        edges = (_Edge * count.value)()
        self._call("cuGraphGetEdges_v2", self._graph, sources, targets, edges, ctypes.byref(count))
        return [(sources[i] or 0, targets[i] or 0, edges[i]) for i in range(count.value)]

    def _name(self, node: int) -> bytes:
        """Empty: it is no kernel."""
        if node not in self._names:
            self._names[node] = self._find_name(ctypes.c_void_p(node))
        return self._names[node]

    def _find_name(self, node: ctypes.c_void_p) -> bytes:
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != _KERNEL:
            return b""
        found, name = _Kernel(), ctypes.c_char_p()
        self._call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(found))
        if found.function:
            self._call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(found.function))
        else:
            self._call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(found.kernel))
        return name.value or b""

    def _change(self, name: str, source: int, target: int, edge: _Edge) -> None:
        ends = (ctypes.c_void_p * 1)(source), (ctypes.c_void_p * 1)(target)
        self._call(name, self._graph, *ends, ctypes.byref(edge), ctypes.c_size_t(1))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise DriverError(f"{name} failed with status {status}.")
