"""Launched steps: finished ones, and those whose tokens are still on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from loramux.memory.device import Fence
from loramux.runner.row_uses import accept
from loramux.types.step import StepResult


class FinishedStep:
    """A step whose result was on the host when it was launched."""

    is_done = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class LaunchedStep:
    """A step that copies its sampled tokens into a host buffer before it passes a fence."""

    is_done = False

    def __init__(
        self,
        sequence_ids: Sequence[int],
        host: Tensor,
        fence: Fence | None,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Take the pinned buffer [>= sampled rows, 2] and the fence after the copy into it.

        A row of it is a token and whether it is invalid. A sequence has one, and one for each of
        its drafts.
        """
        self._sequence_ids = sequence_ids
        self._drafts = drafts or {}
        self._host = host
        self._fence = fence
        self._result: StepResult | None = None

    def tokens(self) -> tuple[list[int], list[int]]:
        """Wait for the device; return the token of each sampled row, and the invalid rows."""
        if self._fence is not None:
            self._fence.wait()
        count = len(self._sequence_ids) + sum(map(len, self._drafts.values()))
        token_ids, is_invalid = self._host[:count].T.tolist()
        return token_ids, [row for row, invalid in enumerate(is_invalid) if invalid]

    def result(self) -> StepResult:
        if self._result is None:
            token_ids, broken = self.tokens()
            if self._drafts or broken:
                self._result = accept(self._sequence_ids, self._drafts, token_ids, broken=broken)
            else:
                tokens = zip(self._sequence_ids, token_ids, strict=True)
                self._result = StepResult({sequence_id: [token] for sequence_id, token in tokens})
        return self._result
