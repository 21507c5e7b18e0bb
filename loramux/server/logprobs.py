"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.backend import TextCodec
from loramux.server.wire import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from loramux.types.request import TokenLogprob

# JSON has no -Infinity.
LOWEST = -9999.0


def chat_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_token(codec, entry) for entry in logprobs])


class CompletionLogprobsWriter:
    """Of one choice: offsets go on from one chunk to the next."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._offset = 0

    def write(
        self, logprobs: Sequence[TokenLogprob], *, first_prompt_token: int | None = None
    ) -> CompletionLogprobs:
        """first_prompt_token: stands before all others and has no probability of its own."""
        written = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        if first_prompt_token is not None:
            self._add(written, first_prompt_token, None)
        for entry in logprobs:
            self._add(written, entry.token_id, entry)
        return written

    def _add(self, written: CompletionLogprobs, token_id: int, entry: TokenLogprob | None) -> None:
        token = self._codec.token_to_str(token_id)
        written.tokens.append(token)
        written.text_offset.append(self._offset)
        written.token_logprobs.append(None if entry is None else max(entry.logprob, LOWEST))
        written.top_logprobs.append(None if entry is None else self._top(token, entry))
        self._offset += len(token)

    def _top(self, token: str, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            # Parts of characters look alike as text: the likeliest stands for them.
            top.setdefault(self._codec.token_to_str(token_id), max(logprob, LOWEST))
        top.setdefault(token, max(entry.logprob, LOWEST))
        return top


def _chat_token(codec: TextCodec, entry: TokenLogprob) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=codec.token_to_str(entry.token_id),
        logprob=max(entry.logprob, LOWEST),
        bytes=list(codec.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(
                token=codec.token_to_str(token_id),
                logprob=max(logprob, LOWEST),
                bytes=list(codec.token_bytes(token_id)),
            )
            for token_id, logprob in entry.top
        ],
    )
