"""Device-side token buffer: the last step's tokens, as input of the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.memory.device import Fence, host_buffer
from loramux.runner.in_flight import LaunchedStep
from loramux.types.step import UNKNOWN_TOKEN, Chunk


class TokenBuffer:
    """Holds the tokens of the last step, and copies them to the host.

    Each has two int32 words: the token, and whether it is invalid.
    """

    def __init__(self, words: Tensor) -> None:
        """words: [2 * sequences] int32"""
        self._words = words
        allocate = host_buffer(words.device)
        # Double buffering: one is read while the next step writes the other.
        self._hosts = [allocate(words.shape[0], torch.int32).view(-1, 2) for _ in range(2)]
        self._places: dict[int, int] = {}

    def place(self, chunk: Chunk) -> int | None:
        """Return the word of the chunk's unknown token; None if all its tokens are known."""
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
            known = self.read(index[:, 1]).to(token_ids.dtype)
            token_ids.index_copy_(0, index[:, 0], known)

    def read(self, places: Tensor) -> Tensor:
        """Gather the last step's tokens at these words: [places] int32."""
        return self._words.index_select(0, places)

    def store(self, token_ids: Tensor) -> None:
        """Store the tokens [sequences] int64 that a step has sampled, see `choose_tokens`."""
        words = token_ids.view(torch.int32)
        self._words[: words.shape[0]].copy_(words)

    def replace(self, rows: Tensor, token_ids: Tensor) -> None:
        """Store the tokens [n] int64 of these rows [n] int32 in place of those of the step."""
        words = token_ids.view(torch.int32).view(-1, 2)
        self._words.view(-1, 2).index_copy_(0, rows.long(), words)

    def publish(
        self, sequence_ids: Sequence[int], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> LaunchedStep:
        """Assign the stored tokens to these sequences, and start their copy to the host.

        A sequence has one, and one for each of its drafts: which of them is its newest token is
        not known before the result.
        """
        count = len(sequence_ids)
        if drafts:
            count += sum(map(len, drafts.values()))
            self._places = {}
        else:
            self._places = {sequence_id: 2 * row for row, sequence_id in enumerate(sequence_ids)}
        self._hosts.reverse()
        host, device = self._hosts[0], self._words.device
        host[:count].copy_(self._words.view(-1, 2)[:count], non_blocking=True)
        fence = Fence(device) if device.type == "cuda" else None
        return LaunchedStep(sequence_ids, host, fence, drafts)

    def forget(self) -> None:
        """Forget the sequences: all their tokens are known on the host."""
        self._places = {}
