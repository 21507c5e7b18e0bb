"""A step that was launched, and whose tokens may still be on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from loramux.memory.device import Fence
from loramux.types.step import StepResult


class Flight(Protocol):
    @property
    def is_over(self) -> bool:
        """The result is there already: what comes next should know it."""
        ...

    def land(self) -> StepResult:
        """Waits for the device; the same result however often it is called."""
        ...


class Landed:
    is_over = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def land(self) -> StepResult:
        return self._result


class TokensInFlight:
    """host [sequences]: what the device writes before it passes the fence."""

    is_over = False

    def __init__(self, sequence_ids: Sequence[int], host: Tensor, fence: Fence | None) -> None:
        self._sequence_ids = sequence_ids
        self._host = host
        self._fence = fence
        self._result: StepResult | None = None

    def land(self) -> StepResult:
        if self._result is None:
            if self._fence is not None:
                self._fence.wait()
            token_ids: list[int] = self._host[: len(self._sequence_ids)].tolist()
            self._result = StepResult(dict(zip(self._sequence_ids, token_ids, strict=True)))
        return self._result
