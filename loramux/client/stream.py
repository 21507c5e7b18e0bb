"""Reads the events of a streamed reply and checks that it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from httpx2 import ServerSentEvent

from loramux.client.errors import BadReply, IncompleteStream, StreamError, read_error
from loramux.client.replies import ChatChunk, CompletionChunk

END = "[DONE]"
FAILED = ("error", "abort")
ChunkT = TypeVar("ChunkT", ChatChunk, CompletionChunk)


class StreamReader(Generic[ChunkT]):
    """Decodes events: `read` each one, then call `check_complete` at the end of the stream."""

    def __init__(self, chunk_type: type[ChunkT], num_choices: int) -> None:
        self.is_over = False
        self._decoder: msgspec.json.Decoder[ChunkT] = msgspec.json.Decoder(chunk_type)
        self._unfinished = set(range(num_choices))

    def read(self, event: ServerSentEvent) -> ChunkT | None:
        """Return the chunk of an event; None if it contains none."""
        if event.data == END:
            self.is_over = True
            return None
        if event.event == "error" or _is_error(event.data):
            message, param = read_error(event.data)
            raise StreamError(
                message or "The server reported an error.", param=param, body=event.data
            )
        if not event.data:
            return None
        try:
            chunk = self._decoder.decode(event.data)
        except msgspec.DecodeError as error:
            raise BadReply(
                f"A chunk of the stream is malformed: {error}", body=event.data
            ) from error
        choices: Sequence[Any] = chunk.choices
        for choice in choices:
            if choice.finish_reason in FAILED:
                raise StreamError(
                    f"The answer ended with finish_reason {choice.finish_reason!r}.",
                    body=event.data,
                )
            if choice.finish_reason is not None:
                self._unfinished.discard(choice.index)
        return chunk

    def check_complete(self) -> None:
        if not self.is_over:
            raise IncompleteStream(
                f"The stream ended without {END}: the answer so far is not complete."
            )
        if self._unfinished:
            raise IncompleteStream(
                f"The stream ended without a finish_reason for choice {min(self._unfinished)}: "
                "the answer so far is not complete."
            )


def _is_error(data: str) -> bool:
    # Most chunks do not contain the word: skip the second decoding.
    if '"error"' not in data:
        return False
    try:
        return bool(msgspec.json.decode(data, type=dict[str, Any]).get("error"))
    except msgspec.DecodeError:
        return False
