"""The graphs of steps, one for each number of rows and mode of LoRA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from loramux.lora.graph_lora import LoraMode
from loramux.memory.device import GraphMaker

Work = Callable[[], None]
Key = tuple[int, LoraMode]
"""(number of rows, LoRA mode)"""


class StepGraphs:
    """Captures graphs and keeps them, and counts the steps that lacked theirs."""

    def __init__(self, device: torch.device, compute: Callable[[int, LoraMode], None]) -> None:
        """`compute` launches the kernels of a step with that many rows and that mode."""
        self.maker = GraphMaker(device)
        self.made: dict[Key, Work] = {}
        self._compute = compute
        self._misses: Counter[Key] = Counter()

    def get(self, key: Key) -> Work:
        """Return the step of a graph, which is captured if it is new."""
        step = self.made.get(key)
        if step is None:
            step = self.made[key] = self.maker.make(lambda: self._compute(*key))
            self._misses.pop(key, None)
        return step

    def run(self, key: Key) -> None:
        is_new = key not in self.made
        step = self.get(key)
        # Capturing has run the step already; a second run would read the tokens of the first.
        if not (is_new and self.maker.has_run):
            step()

    def is_ready(self, key: Key) -> bool:
        """Return whether a step can run at once: its graph is captured, or captures are free."""
        return key in self.made or not self.maker.has_run

    def miss(self, key: Key) -> None:
        """Count a step that ran on a larger graph because its own is not captured."""
        self._misses[key] += 1

    @property
    def wanted(self) -> Key | None:
        """The graph that most steps lacked; None if all steps had theirs."""
        return max(self._misses, key=self._misses.__getitem__) if self._misses else None

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        return [key for key in keys if not self.is_ready(key)]
