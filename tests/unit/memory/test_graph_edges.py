from __future__ import annotations

from typing import Any

import pytest

from loramux.memory.graph_edges import DriverError, GraphEdges

Edge = tuple[int, int, tuple[int, int, int]]
"""From, to, and (port it leaves by, port it comes in by, type)."""
ORDINARY, ON_TRIGGER, ON_BEGIN = (0, 0, 0), (1, 0, 1), (2, 0, 1)
COPY = 2


class Driver:
    """A graph as the driver has it; nodes by their names, which need a GPU to be launched."""

    def __init__(self, names: dict[int, bytes], edges: list[Edge], fails: str = "") -> None:
        self.names, self.edges, self.fails = names, edges, fails

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cu")
        found = getattr(type(self), name.removesuffix("_v2").replace("cu", "on_", 1))

        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 801
            found(self, *arguments)
            return 0

        return call

    def on_GraphGetEdges(self, graph: Any, sources: Any, targets: Any, kinds: Any, n: Any) -> None:  # noqa: N802
        assert graph.value == 7
        n._obj.value = len(self.edges)
        if sources is not None:
            for i, (source, target, kind) in enumerate(self.edges):
                sources[i], targets[i] = source, target
                kinds[i].from_port, kinds[i].to_port, kinds[i].type = kind

    def on_GraphNodeGetType(self, node: Any, kind: Any) -> None:  # noqa: N802
        kind._obj.value = 0 if self.names[node.value] else COPY

    def on_GraphKernelNodeGetParams(self, node: Any, found: Any) -> None:  # noqa: N802
        # Libraries load their kernels in another way, which gives them another kind of handle.
        handle = "kernel" if self.names[node.value].startswith(b"nvjet") else "function"
        setattr(found._obj, handle, node.value)

    def on_FuncGetName(self, name: Any, function: Any) -> None:  # noqa: N802
        name._obj.value = self.names[function.value]

    on_KernelGetName = on_FuncGetName  # noqa: N815

    def on_GraphRemoveDependencies(
        self, _: Any, source: Any, target: Any, kind: Any, n: Any
    ) -> None:  # noqa: N802
        self.edges.remove(self._edge(source, target, kind, n))

    def on_GraphAddDependencies(self, _: Any, source: Any, target: Any, kind: Any, n: Any) -> None:  # noqa: N802
        self.edges.append(self._edge(source, target, kind, n))

    def _edge(self, source: Any, target: Any, kind: Any, n: Any) -> Edge:
        assert n.value == 1
        ports = kind._obj.from_port, kind._obj.to_port, kind._obj.type
        return source[0], target[0], ports


NAMES = {1: b"_add_norm", 2: b"nvjet_sm90_tst_64x64", 3: b"_rotate_write", 4: b"attend", 5: b""}


def test_kernels_behind_a_library_s_product_begin_with_it() -> None:
    """And no other: not those behind our own kernels, and not the product, which does not wait."""
    edges = [(1, 2, ORDINARY), (2, 3, ON_TRIGGER), (3, 4, ON_TRIGGER), (4, 5, ORDINARY)]
    driver = Driver(NAMES, edges.copy())
    assert GraphEdges(driver, 7).begin_with_products() == 1
    assert sorted(driver.edges) == sorted([*edges[:1], (2, 3, ON_BEGIN), *edges[2:]])
    assert GraphEdges(driver, 7).begin_with_products() == 0, "once is enough"


def test_kernels_that_do_not_wait_by_themselves_stay_where_they_are() -> None:
    """Catches a kernel that would read a product while it is being written."""
    edges = [(2, 4, ORDINARY), (5, 2, ORDINARY), (2, 5, ORDINARY)]
    driver = Driver(NAMES, edges.copy())
    assert GraphEdges(driver, 7).begin_with_products() == 0
    assert driver.edges == edges


@pytest.mark.parametrize("name", ["cuGraphGetEdges_v2", "cuGraphAddDependencies_v2"])
def test_a_driver_that_cannot_is_an_error(name: str) -> None:
    driver = Driver(NAMES, [(2, 3, ON_TRIGGER)], fails=name)
    with pytest.raises(DriverError, match=f"{name} failed with status 801"):
        GraphEdges(driver, 7).begin_with_products()


def test_an_empty_graph_has_no_edges() -> None:
    assert GraphEdges(Driver({}, []), 7).begin_with_products() == 0
