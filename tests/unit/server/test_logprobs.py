"""Log probabilities as JSON: offsets, alternatives, and numbers that JSON cannot hold."""

from __future__ import annotations

import math

from loramux.server.families.openai import LOWEST, CompletionLogprobsWriter, chat_logprobs
from loramux.types.request import TokenLogprob
from tests.unit.server.scripted_backend import ByteCodec

IMPOSSIBLE = TokenLogprob(65, -math.inf, 9, ((66, -0.1), (67, -math.inf)))


def test_minus_infinity_becomes_a_number() -> None:
    [entry] = chat_logprobs(ByteCodec(), [IMPOSSIBLE]).content
    assert entry.logprob == LOWEST
    assert [top.logprob for top in entry.top_logprobs] == [-0.1, LOWEST]
    written = CompletionLogprobsWriter(ByteCodec()).write([IMPOSSIBLE])
    assert written.token_logprobs == [LOWEST]
    assert written.top_logprobs == [{"B": -0.1, "C": LOWEST, "A": LOWEST}]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    writer = CompletionLogprobsWriter(ByteCodec())
    entry = TokenLogprob(65, -1.0, 1)
    assert writer.write([entry], first_prompt_token=66).text_offset == [0, 1]
    assert writer.write([entry, entry]).text_offset == [2, 3]


def test_tokens_that_look_alike_keep_the_likeliest() -> None:
    halves = TokenLogprob(0xC3, -0.5, 1, ((0xC3, -0.5), (0xE2, -2.0)))
    [top] = CompletionLogprobsWriter(ByteCodec()).write([halves]).top_logprobs
    assert top == {"\ufffd": -0.5}
