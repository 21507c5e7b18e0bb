"""Launched steps: finished ones, and those whose tokens are still on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import Tensor

from loramux.memory.device import Fence
from loramux.runner.batch import NOT_FINITE
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
        """Take the pinned buffer [>= sequences, 2] and the fence after the copy into it.

        A row of it is a token and whether it is invalid.
        """
        self._sequence_ids = sequence_ids
        self._host = host
        self._fence = fence
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            if self._fence is not None:
                self._fence.wait()
            token_ids, is_invalid = self._host[: len(self._sequence_ids)].T.tolist()
            tokens = zip(self._sequence_ids, token_ids, strict=True)
            self._result = StepResult({sequence_id: [token] for sequence_id, token in tokens})
            if any(is_invalid):
                broken = compress(self._sequence_ids, is_invalid)
                self._result.failed.update(dict.fromkeys(broken, NOT_FINITE))
        return self._result
