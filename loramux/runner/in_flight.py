"""Launched steps: finished ones, and those whose tokens are still on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loramux.memory.device import Fence
from loramux.types.step import StepResult


class FinishedStep:
    """A step whose result was on the host when it was launched."""

    is_done = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class LaunchedStep:
    """A step that copies one token per sequence into a host buffer before it passes a fence."""

    is_done = False

    def __init__(self, sequence_ids: Sequence[int], host: Tensor, fence: Fence | None) -> None:
        """Take the pinned buffer [>= sequences] and the fence after the copy into it."""
        self._sequence_ids = sequence_ids
        self._host = host
        self._fence = fence
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            if self._fence is not None:
                self._fence.wait()
            token_ids: list[int] = self._host[: len(self._sequence_ids)].tolist()
            self._result = StepResult(
                {
                    sequence_id: [token_id]
                    for sequence_id, token_id in zip(self._sequence_ids, token_ids, strict=True)
                }
            )
        return self._result
