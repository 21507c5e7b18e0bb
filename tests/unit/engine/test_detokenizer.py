from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loramux.engine.detokenizer import Detokenizer
from loramux.engine.tokenizer import Tokenizer
from tests.tokenizer_factory import TEXT, save_byte_fallback, save_byte_level

TOKENS = st.lists(st.integers(0, 400), max_size=30)
STOPS = ["op", "o", "fox", "p h", "aab", "aaab", "🙂", "\ufffd", "<|im_end|>", "the"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def texts(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*[detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one token per byte."""
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [of_byte[bytes([byte])] for byte in data]


def read_until_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=150)
@given(token_ids=TOKENS, skip=st.booleans())
def test_the_pieces_of_any_tokens_equal_the_decoded_output(
    tokenizer: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    """Catches characters lost, doubled or replaced where tokens cut them, also in broken UTF-8."""
    pieces = texts(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(data=st.binary(max_size=24))
@example(data=b"\xf0\x9f\x99\x82")
@example(data=b"\xe2\x82\xff\xc3")
@example(data=b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\xaf")
def test_the_pieces_of_any_bytes_equal_the_decoded_output(
    tokenizer: Tokenizer, data: bytes
) -> None:
    """Catches a number of replacement characters that differs from the tokenizer's."""
    token_ids = byte_ids(tokenizer, data)
    assert "".join(texts(Detokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=150)
@given(
    token_ids=TOKENS,
    text=st.text(alphabet="aabopstfxh 🙂", max_size=20),
    stop=st.lists(st.sampled_from(STOPS), max_size=3, unique=True).map(tuple),
    include=st.booleans(),
)
def test_the_stop_string_that_ends_first_cuts_the_text(
    tokenizer: Tokenizer, token_ids: list[int], text: str, stop: tuple[str, ...], include: bool
) -> None:
    """Catches a stop string that depends on token boundaries, and a partial one that was sent."""
    token_ids = [*byte_ids(tokenizer, text.encode()), *token_ids]
    detokenizer = Detokenizer(
        tokenizer, skip_special_tokens=False, stop=stop, include_stop_str_in_output=include
    )
    found = "".join(texts(detokenizer, token_ids))
    whole = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert (found, detokenizer.stopped_by) == read_until_stop(whole, stop, include)


def test_text_is_not_held_longer_than_needed(tokenizer: Tokenizer) -> None:
    """Catches a stream that stalls although its end cannot begin a stop string."""
    token_ids = byte_ids(tokenizer, "ab🙂stxstop!".encode())
    pieces = texts(Detokenizer(tokenizer, stop=("stop",)), token_ids)
    assert pieces == ["a", "b", "", "", "", "🙂", "", "", "stx", *[""] * 6]
    assert texts(Detokenizer(tokenizer, stop=("stop",)), token_ids[:8])[-2:] == ["", "st"]


def test_skipped_tokens_do_not_split_a_character(tokenizer: Tokenizer) -> None:
    """Catches a special or unknown token that breaks the character around it."""
    first, second = byte_ids(tokenizer, "é".encode())
    assert texts(Detokenizer(tokenizer), [first, 2, 10_000, second]) == ["", "", "", "é", ""]


@pytest.mark.parametrize("text", [*TEXT, "  two  spaces ", "né🙂 你好", "\n\n"])
def test_tokens_with_a_word_mark_keep_their_spaces(fallback: Tokenizer, text: str) -> None:
    """Catches a first word that loses its space, and bytes shown before they are a character."""
    prompt = fallback.encode("The fox")
    answer = fallback.encode(f"The fox{text}", add_special_tokens=False)[len(prompt) :]
    whole = fallback.decode([*prompt, *answer])
    pieces = texts(Detokenizer(fallback, prompt_token_ids=prompt), answer)
    assert fallback.decode(prompt) + "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)
    alone = fallback.encode(text)
    assert "".join(texts(Detokenizer(fallback), alone)) == fallback.decode(alone)


@settings(max_examples=60)
@given(token_ids=TOKENS)
def test_invalid_byte_tokens_are_not_held_back_forever(
    fallback: Tokenizer, token_ids: list[int]
) -> None:
    """Catches a window that grows with the answer, and an exception on invalid UTF-8."""
    broken = next(i for i in range(fallback.vocab_size) if fallback.token_bytes(i) == b"\xff")
    detokenizer = Detokenizer(fallback)
    pieces = texts(detokenizer, [*[broken] * 40, *token_ids])
    assert sum(map(len, pieces[:40])) >= 36


def test_the_cost_of_a_token_does_not_grow(
    fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a decoder that reads the whole answer for each token of it."""
    lengths: list[int] = []
    decode = fallback.decode

    def count(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(fallback, "decode", count)
    token_ids = fallback.encode("The lazy dog 🙂 " * 20)
    texts(Detokenizer(fallback, prompt_token_ids=token_ids), token_ids)
    assert max(lengths) <= 12
    assert len(lengths) <= 2 * len(token_ids) + 2
