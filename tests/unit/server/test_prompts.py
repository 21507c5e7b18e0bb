"""Prompts to token ids, and room for an answer, with numbers in every refusal."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from loramux.errors import InvalidRequest
from loramux.server.generate.prompts import (
    INLINE_BODY_BYTES,
    check_characters,
    check_token_ids,
    encode_messages,
    off_loop,
    room_for_answer,
    split_prompts,
)
from loramux.server.generate.sampling import MaxTokens
from tests.unit.server.scripted_backend import ByteCodec


def room(num_tokens: int, asked: int | None, default: int | None = None) -> int:
    return room_for_answer(
        num_tokens, MaxTokens(asked), max_model_len=10, default=default, param="prompt"
    )


def test_room_is_what_is_asked_or_what_is_left() -> None:
    assert room(4, None) == 6
    assert room(4, None, default=16) == 6
    assert room(4, None, default=2) == 2
    assert room(4, 6) == 6
    assert room(10, 0) == 0


@pytest.mark.parametrize(
    ("num_tokens", "asked", "numbers"),
    [(10, None, ("10",)), (11, 0, ("11", "10")), (4, 7, ("7", "4", "6", "10")), (0, None, ())],
)
def test_refusal_has_the_numbers(num_tokens: int, asked: int | None, numbers: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        room(num_tokens, asked)
    assert all(number in str(refusal.value) for number in numbers)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    check_characters(2560, 10, "prompt")
    with pytest.raises(InvalidRequest, match="2561 characters"):
        check_characters(2561, 10, "prompt")


def test_only_long_work_goes_to_a_thread() -> None:
    async def where(num_bytes: int) -> bool:
        return await off_loop(num_bytes, threading.get_ident) == threading.get_ident()

    assert asyncio.run(where(INLINE_BODY_BYTES))
    assert not asyncio.run(where(INLINE_BODY_BYTES + 1))


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    check_token_ids([0, 9], vocab_size=10, param="tokens")
    for token_id in (-1, 10):
        with pytest.raises(InvalidRequest, match=f"token {token_id}"):
            check_token_ids([5, token_id, 5], vocab_size=10, param="tokens")


def test_mixed_prompts_are_refused() -> None:
    assert split_prompts("a") == ["a"]
    for prompt in (["a", 1], [[1], "a"], []):
        with pytest.raises(InvalidRequest, match="prompt"):
            split_prompts(prompt)


def test_messages_that_exhaust_the_stack_are_refused() -> None:
    """A tool call's arguments are JSON inside JSON, which no decoder has bounded yet."""

    class Deep(ByteCodec):
        def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
            raise RecursionError

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        encode_messages(Deep(), [{"role": "user", "content": "hi"}], max_model_len=10)


def test_continued_message_reaches_the_template() -> None:
    seen: dict[str, Any] = {}

    class Recorder(ByteCodec):
        def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
            seen.update(arguments)
            return [1]

    messages = [{"role": "assistant", "content": "Once"}]
    encode_messages(Recorder(), messages, max_model_len=10, continue_final_message=True)
    assert seen["chat_template_kwargs"] == {"continue_final_message": True}
    assert seen["add_generation_prompt"] is False
