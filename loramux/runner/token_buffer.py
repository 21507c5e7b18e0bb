"""Device-side token buffer: the last step's tokens, as input of the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.memory.device import Fence, host_buffer
from loramux.runner.in_flight import LaunchedStep
from loramux.types.step import UNKNOWN_TOKEN, Chunk


class TokenBuffer:
    """Holds the tokens [sequences] int32 of the last step, and copies them to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        allocate = host_buffer(tokens.device)
        # Double buffering: one is read while the next step writes the other.
        self._hosts = [allocate(tokens.shape[0], torch.int32) for _ in range(2)]
        self._places: dict[int, int] = {}

    def place(self, chunk: Chunk) -> int | None:
        """Return the index of the chunk's unknown token; None if all its tokens are known."""
        is_known = chunk.token_ids[-1] != UNKNOWN_TOKEN
        return None if is_known else self._places[chunk.sequence_id]

    def fill_in(
        self, chunks: Sequence[Chunk], row_starts: Sequence[int], token_ids: Tensor
    ) -> None:
        """Write the unknown tokens of the chunks to their rows of token_ids [rows]."""
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
        """Gather the last step's tokens at these indices: [places] int32."""
        return self._tokens.index_select(0, places)

    def store(self, token_ids: Tensor) -> None:
        """Store the tokens [sequences] that a step has sampled."""
        self._tokens[: token_ids.shape[0]].copy_(token_ids)

    def publish(self, sequence_ids: Sequence[int]) -> LaunchedStep:
        """Assign the stored tokens to these sequences, and start their copy to the host."""
        count = len(sequence_ids)
        self._places = {sequence_id: place for place, sequence_id in enumerate(sequence_ids)}
        self._hosts.reverse()
        host, device = self._hosts[0], self._tokens.device
        host[:count].copy_(self._tokens[:count], non_blocking=True)
        fence = Fence(device) if device.type == "cuda" else None
        return LaunchedStep(sequence_ids, host, fence)

    def forget(self) -> None:
        """Forget the sequences: all their tokens are known on the host."""
        self._places = {}
