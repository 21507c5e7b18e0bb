"""The tokens of the last step, kept on the device as the next one's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.memory.device import Fence, host_buffer
from loramux.runner.in_flight import LaunchedStep
from loramux.types.step import UNKNOWN_TOKEN, Chunk


class TokenBuffer:
    """tokens [sequences] int32, filled from the front by each step."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        allocate = host_buffer(tokens.device)
        # A step's tokens are read while the next step's are on their way.
        self._hosts = [allocate(tokens.shape[0], torch.int32) for _ in range(2)]
        self._places: dict[int, int] = {}

    def place(self, chunk: Chunk) -> int | None:
        """Where the last step left the token that the chunk lacks; None: it lacks none."""
        is_known = chunk.token_ids[-1] != UNKNOWN_TOKEN
        return None if is_known else self._places[chunk.sequence_id]

    def fill_in(
        self, chunks: Sequence[Chunk], row_starts: Sequence[int], token_ids: Tensor
    ) -> None:
        """Writes unknown tokens to their rows. token_ids [rows]"""
        found = [
            (start + len(chunk.token_ids) - 1, place)
            for chunk, start in zip(chunks, row_starts, strict=True)
            if (place := self.place(chunk)) is not None
        ]
        if found:
            index = send(torch.tensor(found), token_ids.device)
            known = self._tokens.index_select(0, index[:, 1]).to(token_ids.dtype)
            token_ids.index_copy_(0, index[:, 0], known)

    def read(self, places: Tensor) -> Tensor:
        """[places] int32: the last step's tokens there."""
        return self._tokens.index_select(0, places)

    def take(self, token_ids: Tensor) -> None:
        """token_ids [sequences]"""
        self._tokens[: token_ids.shape[0]].copy_(token_ids)

    def publish(self, sequence_ids: Sequence[int]) -> LaunchedStep:
        """What `take` has got is these sequences' newest tokens; sends it to the host."""
        count = len(sequence_ids)
        self._places = {sequence_id: place for place, sequence_id in enumerate(sequence_ids)}
        self._hosts.reverse()
        host, device = self._hosts[0], self._tokens.device
        host[:count].copy_(self._tokens[:count], non_blocking=True)
        fence = Fence(device) if device.type == "cuda" else None
        return LaunchedStep(sequence_ids, host, fence)

    def forget(self) -> None:
        """The last step's tokens are on the host."""
        self._places = {}
