"""Counts the tokens of a generation."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.backend.text import Delta
from loramux.types.request import Request
from loramux.wire.text import PromptTokensDetails, Usage


class UsageCount:
    """The usage of a generation, from the deltas so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt_tokens = sum(len(one.prompt_token_ids) for one in requests)
        self._num_completion_tokens = 0
        self._num_reused: dict[int, int] = {}

    def add(self, request_index: int, delta: Delta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        if delta.num_reused is not None:
            # A prompt counts once for all its choices: others reuse what the first computed.
            before = self._num_reused.get(request_index, delta.num_reused)
            self._num_reused[request_index] = min(before, delta.num_reused)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_reused.values())),
        )
