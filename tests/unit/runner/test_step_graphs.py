"""Graphs of steps are made once, and a step runs once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loramux.lora.graph_lora import BASE_MODE
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


@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_runs_once_if_its_graph_is_new_or_not(has_run: bool) -> None:
    runs: list[str] = []
    graphs = StepGraphs(CPU)
    graphs.maker = Maker(runs, has_run)
    for _ in range(2):
        graphs.run((4, BASE_MODE), lambda: runs.append("run"))
    assert runs == ["made", "run", "run"]
    graphs.get((4, BASE_MODE), lambda: runs.append("other"))()
    assert runs[3:] == ["run"]


def test_each_size_and_mode_has_its_own_graph() -> None:
    runs: list[str] = []
    graphs = StepGraphs(CPU)
    graphs.maker = Maker(runs, has_run=False)
    keys = [(4, BASE_MODE), (8, BASE_MODE), (4, SEGMENTED)]
    for key in keys:
        graphs.get(key, lambda: None)
    assert list(graphs.made) == keys
    assert runs == ["made"] * 3
