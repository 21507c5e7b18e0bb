"""The host inputs of a graph for extras of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loramux.kernels.gpu.extras.tables import ExtrasLimits
from loramux.kernels.gpu.lora.work_list import WorkListFull
from loramux.lora.device_extras import ExtrasUse
from loramux.lora.extras_step import ExtrasStep, ExtrasWork
from loramux.runner.host_buffer import HostBuffer
from loramux.types.request import Selection


class ExtrasInputs:
    """The list of rows and adapters at a fixed address; only steps with such adapters send it."""

    def __init__(self, work: ExtrasWork, limits: ExtrasLimits, device: torch.device) -> None:
        self._work = work
        self._limits = limits
        self._words = HostBuffer([limits.num_words], device)
        self._num_used = 0

    def fill(self, selections: Sequence[Selection], lengths: Sequence[int]) -> bool:
        """Fill the list, to be sent; return False if it has no room for the step."""
        self._words.begin()
        try:
            out = self._words.host[0]
            self._num_used = self._work.fill(selections, lengths, self._limits, out)
        except WorkListFull:
            return False
        return True

    def send(self) -> None:
        """Copy the list to the device, without waiting for it."""
        self._words.send(self._num_used)

    def send_padding(self) -> None:
        """Send the list of a step without adapters."""
        self.fill((), ())
        self.send()

    def step(self, uses: ExtrasUse) -> ExtrasStep:
        return self._work.step(self._words.fields[0], self._limits, uses)
