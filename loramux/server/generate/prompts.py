"""Tokenization of prompts and messages, and checks of their length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from loramux.backend.text import TextCodec
from loramux.base.threads import ADAPTER_TEXTS
from loramux.errors import ContextLengthExceeded, InvalidRequest
from loramux.server.chat.tools.families import template_of
from loramux.server.generate.sampling import MaxTokens

T = TypeVar("T")

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text -> the key that holds it."""

# No known tokenizer has longer tokens, so a longer text cannot fit.
MAX_CHARACTERS_PER_TOKEN = 256
# A text of more tokens than this times the context is refused before all of it is tokenized, also
# if it would be truncated.
MAX_CONTEXTS = 4
MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 256
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SLICE_CHARACTERS = 65_536
# Tokenizing a larger body would delay the streams that share the event loop.
INLINE_BODY_BYTES = 8192


async def off_loop(
    body_bytes: int,
    work: Callable[[], T],
    *,
    codec: TextCodec | None = None,
    base: TextCodec | None = None,
) -> T:
    """Run work proportional to the body's size: inline for a small body, else on a thread.

    `codec`: with what the work encodes. That of an adapter asks another process, which may take
    long: such work has threads of its own, and one at a time for each codec.
    """
    if codec is not None and codec is not base:
        return await ADAPTER_TEXTS.run(id(codec), work)
    return work() if body_bytes <= INLINE_BODY_BYTES else await asyncio.to_thread(work)


def split_prompts(prompt: str | list[Any], *, param: str = "prompt") -> list[str | list[int]]:
    """Convert the four forms of a completion's prompt to a list of texts or of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return list(prompt)
    raise InvalidRequest(
        f"{param} is an empty list: give at least one {param}."
        if not prompt
        else f"{param} mixes kinds: give a text, token ids, a list of texts or a list of token "
        "ids.",
        param=param,
    )


def encode_prompt(
    codec: TextCodec, prompt: str | list[int], *, max_model_len: int, add_special_tokens: bool
) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    check_characters(len(prompt), max_model_len, "prompt")
    check_num_tokens(codec, prompt, max_model_len, "prompt")
    return codec.encode(prompt, add_special_tokens=add_special_tokens)


def encode_pair(
    codec: TextCodec, first: str, second: str, max_model_len: int, add_special_tokens: bool
) -> Sequence[int]:
    """Encode two texts as one input, with the special tokens that the tokenizer puts between."""
    for text in (first, second):
        check_characters(len(text), max_model_len, "text")
        check_num_tokens(codec, text, max_model_len, "text")
    return codec.encode_pair(first, second, add_special_tokens=add_special_tokens)


def check_num_tokens(codec: TextCodec, text: str, max_model_len: int, param: str) -> None:
    """Raise ContextLengthExceeded for a text of many more tokens than the context has.

    It is tokenized slice by slice until there are too many. A text that fits is never refused:
    cutting it adds a few tokens for each slice.
    """
    limit = MAX_CONTEXTS * max_model_len
    if len(text) <= max(limit, _SLICE_CHARACTERS):
        return
    num_tokens = 0
    for start in range(0, len(text), _SLICE_CHARACTERS):
        piece = text[start : start + _SLICE_CHARACTERS]
        num_tokens += len(codec.encode(piece, add_special_tokens=False))
        if num_tokens > limit:
            raise ContextLengthExceeded(
                f"{_maximum(max_model_len)} However, {param} has more than {limit} tokens. "
                f"Shorten {param}.",
                param=param,
            )


def encode_messages(  # noqa: PLR0913  (the arguments of a chat template)
    codec: TextCodec,
    messages: Sequence[dict[str, Any]],
    *,
    max_model_len: int,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    _check_messages(messages)
    _check_roles(messages, codec)
    for param, value in (
        ("messages", messages),
        ("tools", tools),
        ("chat_template_kwargs", chat_template_kwargs),
    ):
        texts = list(_texts(value))
        check_characters(sum(map(len, texts)), max_model_len, param)
        check_num_tokens(codec, "".join(texts), max_model_len, param)
    arguments = dict(chat_template_kwargs or {})
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        arguments["continue_final_message"] = True
        add_generation_prompt = False
    try:
        return codec.apply_chat_template(
            [_plain_parts(message) for message in messages],
            add_generation_prompt=add_generation_prompt is not False,
            tools=tools,
            chat_template_kwargs=arguments or None,
        )
    except RecursionError as error:
        raise InvalidRequest("messages are nested too deeply.", param="messages") from error


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    outside = [i for i in (min(token_ids), max(token_ids)) if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequest(
            f"{param} has token {outside[0]}, outside the vocabulary of {vocab_size}.", param=param
        )


def room_for_answer(
    num_prompt_tokens: int,
    asked: MaxTokens,
    *,
    max_model_len: int,
    default: int | None,
    param: str,
) -> int:
    """max_tokens of one prompt; raises if it does not fit. Default None: as many as fit."""
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{param} is empty: give at least one token.", param=param)
    room = max_model_len - num_prompt_tokens
    max_tokens = asked.value
    if room < (1 if max_tokens is None else min(1, max_tokens)):
        raise ContextLengthExceeded(
            f"{_maximum(max_model_len)} However, you requested {num_prompt_tokens} tokens in "
            f"{param}, which leave no room for an answer. Shorten {param}.",
            param=param,
        )
    if max_tokens is None:
        return room if default is None else min(default, room)
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"{_maximum(max_model_len)} However, you requested {num_prompt_tokens + max_tokens} "
            f"tokens: {num_prompt_tokens} in {param} and {max_tokens} with {asked.param}, which "
            f"may be {room}. Shorten {param}, or lower {asked.param}.",
            param=asked.param,
        )
    return max_tokens


def _maximum(max_model_len: int) -> str:
    """Return the words by which clients recognise that a prompt is too long."""
    return f"This model's maximum context length is {max_model_len} tokens."


def check_characters(num_characters: int, max_model_len: int, param: str) -> None:
    if num_characters > max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"{_maximum(max_model_len)} However, you requested {num_characters} characters in "
            f"{param}, which cannot fit. Shorten {param}.",
            param=param,
        )


def _texts(value: object) -> Iterator[str]:
    """Yield all strings of a JSON value, keys included: a template may write any of them."""
    open_values = [value]
    while open_values:
        match open_values.pop():
            case str(text):
                yield text
            case dict() as fields:
                yield from map(str, fields)
                open_values.extend(fields.values())
            case list() | tuple() as items:
                open_values.extend(items)


def _check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Refuses messages without a role, too many of them, and parts that are not text."""
    if not messages:
        raise InvalidRequest("messages must not be empty: send at least one.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.",
            param="messages",
        )
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f"{place} needs a role, such as 'user'.", param="messages")
        if len(role) > MAX_ROLE_CHARACTERS:
            raise InvalidRequest(
                f"{place}.role has {len(role)} characters; it may have {MAX_ROLE_CHARACTERS}.",
                param="messages",
            )
        if not isinstance(message.get("tool_calls"), list | None):
            raise InvalidRequest(f"{place}.tool_calls must be a list.", param="messages")
        _check_content(message.get("content"), f"{place}.content")


def _check_roles(messages: Sequence[dict[str, Any]], codec: TextCodec) -> None:
    """Refuses a role that neither the APIs nor the chat template of the model know."""
    for number, message in enumerate(messages):
        role = message["role"]
        if role in ROLES:
            continue
        template = template_of(codec)
        if f"'{role}'" not in template and f'"{role}"' not in template:
            raise InvalidRequest(
                f"messages[{number}] has the role {role!r}. Roles are {', '.join(ROLES)}, and "
                "those that the chat template of the model names.",
                param="messages",
            )


def _check_content(content: object, place: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} must be a string or a list of parts.", param="messages")
    for number, part in enumerate(content):
        _part_text(part, f"{place}[{number}]")


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS.get(str(kind), "text")) if isinstance(part, dict) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        is_other = isinstance(kind, str) and kind not in TEXT_PARTS
        what = f"a part of type {kind!r}" if is_other else "no text"
        raise InvalidRequest(
            f"{place} is {what}: this model takes parts like "
            '{"type": "text", "text": "..."} only.',
            param="messages",
        )
    return text


def _plain_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message with parts of one kind, which chat templates know.

    An assistant's message may have a refusal in place of a content, or neither.
    """
    content = message.get("content")
    if content is None and message["role"] == "assistant" and not message.get("tool_calls"):
        refusal = message.get("refusal")
        return {**message, "content": refusal if isinstance(refusal, str) else ""}
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": _part_text(part, "content")} for part in content]
    return {**message, "content": parts}
