"""The graphs of steps, one for each number of rows and mode of LoRA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.lora.graph_lora import LoraMode
from loramux.memory.device import GraphMaker
from loramux.runner.gemm.dispatch import Products

Work = Callable[[], None]
Key = tuple[int, LoraMode]
"""Rows, and the mode of LoRA."""


class StepGraphs:
    """Each is made when it is first needed, and kept."""

    def __init__(self, products: Products, device: torch.device) -> None:
        """products: those of the steps, which look for the best way to compute a new shape"""
        self._products = products
        self.maker = GraphMaker(device)
        self.made: dict[Key, Work] = {}

    def get(self, key: Key, work: Work, *, launches_early: bool = False) -> Work:
        """launches_early: as in GraphMaker.make"""
        step = self.made.get(key)
        if step is None:
            with self._products.searching():
                step = self.maker.make(work, launches_early=launches_early)
            self.made[key] = step
        return step

    def run(self, key: Key, work: Work, *, launches_early: bool = False) -> None:
        is_new = key not in self.made
        step = self.get(key, work, launches_early=launches_early)
        # Not twice: the second time it would read the tokens that it has just made.
        if not (is_new and self.maker.has_run):
            step()
