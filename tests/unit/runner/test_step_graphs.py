"""Graphs of steps are made once, and a step runs once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loramux.lora.graph_lora import BASE_MODE
from loramux.memory.device import GraphMaker
from loramux.runner.gemm.dispatch import Products
from loramux.runner.step_graphs import StepGraphs
from tests.lora_factory import SEGMENTED

CPU = torch.device("cpu")


class Maker(GraphMaker):
    """As on a GPU, where what is made has run."""

    def __init__(self, runs: list[str], has_run: bool) -> None:
        super().__init__(CPU)
        self._runs = runs
        self._has_run = has_run

    @property
    def has_run(self) -> bool:
        return self._has_run

    def make(self, work: Any, *, launches_early: bool = False) -> Any:
        self._runs.append("made early" if launches_early else "made")
        if self._has_run:
            work()
        return work


@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_runs_once_whether_or_not_it_is_new(has_run: bool) -> None:
    runs: list[str] = []
    graphs = StepGraphs(Products(None, []), CPU)
    graphs.maker = Maker(runs, has_run)
    for _ in range(2):
        graphs.run((4, BASE_MODE), lambda: runs.append("run"))
    assert runs == ["made", "run", "run"]
    graphs.get((4, BASE_MODE), lambda: runs.append("other"))()
    assert runs[3:] == ["run"]


def test_each_size_and_kind_has_its_own() -> None:
    runs: list[str] = []
    graphs = StepGraphs(Products(None, []), CPU)
    graphs.maker = Maker(runs, has_run=False)
    keys = [(4, BASE_MODE), (8, BASE_MODE), (4, SEGMENTED)]
    for key in keys:
        graphs.get(key, lambda: None, launches_early=key[0] == 4)
    assert list(graphs.made) == keys
    assert runs == ["made early", "made", "made early"]


def test_products_are_searched_while_a_graph_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(None, [])
    seen: list[str] = []
    graphs = StepGraphs(products, CPU)

    @contextmanager
    def searching() -> Iterator[None]:
        seen.append("begun")
        yield
        seen.append("ended")

    monkeypatch.setattr(products, "searching", searching)
    for _ in range(2):
        graphs.run((1, BASE_MODE), lambda: seen.append("run"))
    assert seen == ["begun", "ended", "run", "run"]
