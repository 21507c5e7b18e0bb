"""Graphs of steps are made once, and a step runs once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loramux.lora.graph_lora import BASE_MODE, LoraMode
from loramux.memory.device import GraphMaker
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

    def make(self, work: Any) -> Any:
        self._runs.append("made")
        if self._has_run:
            work()
        return work


def make_graphs(runs: list[str], *, has_run: bool) -> StepGraphs:
    def compute(num_rows: int, mode: LoraMode) -> None:
        runs.append(f"{num_rows} {mode}")

    graphs = StepGraphs(CPU, compute)
    graphs.maker = Maker(runs, has_run)
    return graphs


@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_runs_once_if_its_graph_is_new_or_not(has_run: bool) -> None:
    runs: list[str] = []
    graphs = make_graphs(runs, has_run=has_run)
    for _ in range(2):
        graphs.run((4, BASE_MODE))
    assert runs == ["made", "4 none", "4 none"]
    graphs.get((4, BASE_MODE))()
    assert runs[3:] == ["4 none"]


def test_each_size_and_mode_has_its_own_graph() -> None:
    runs: list[str] = []
    graphs = make_graphs(runs, has_run=False)
    keys = [(4, BASE_MODE), (8, BASE_MODE), (4, SEGMENTED)]
    for key in keys:
        graphs.get(key)
    assert list(graphs.made) == keys
    assert runs == ["made"] * 3


def test_the_graph_that_most_steps_lacked_is_wanted_until_it_is_made() -> None:
    graphs = make_graphs([], has_run=True)
    one, two = (1, BASE_MODE), (2, BASE_MODE)
    assert graphs.wanted is None and not graphs.is_ready(one)
    for key in (one, two, two):
        graphs.miss(key)
    assert graphs.wanted == two
    graphs.get(two)
    assert graphs.wanted == one and graphs.is_ready(two)
    graphs.get(one)
    assert graphs.wanted is None


def test_captures_that_cost_nothing_are_always_ready() -> None:
    assert make_graphs([], has_run=False).is_ready((1, BASE_MODE))
