"""The graphs of steps, one for each number of rows and mode of LoRA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.lora.graph_lora import LoraMode
from loramux.memory.device import GraphMaker

Work = Callable[[], None]
Key = tuple[int, LoraMode]
"""(number of rows, LoRA mode)"""


class StepGraphs:
    """Captures each graph when it is first needed, and keeps it."""

    def __init__(self, device: torch.device) -> None:
        self.maker = GraphMaker(device)
        self.made: dict[Key, Work] = {}

    def get(self, key: Key, work: Work) -> Work:
        step = self.made.get(key)
        if step is None:
            step = self.made[key] = self.maker.make(work)
        return step

    def run(self, key: Key, work: Work) -> None:
        is_new = key not in self.made
        step = self.get(key, work)
        # Capturing has run the step already; a second run would read the tokens of the first.
        if not (is_new and self.maker.has_run):
            step()
