"""Tokens for tools that count them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.asgi_client import get, make_app, post
from tests.unit.server.scripted_backend import ByteCodec, ScriptedBackend

MESSAGES = [{"role": "user", "content": "hi"}]


def test_prompt_and_messages_become_the_tokens_that_generation_uses() -> None:
    app = make_app()
    answer = post(app, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [97, 98],
        "token_strs": ["a", "b"],
    }
    answer = post(app, "/tokenize", {"model": "legal", "messages": MESSAGES}).json()
    assert bytes(answer["tokens"]) == b"u:hi\na:"
    assert answer["token_strs"] is None


def test_tokens_become_text_again() -> None:
    app = make_app()
    assert post(app, "/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert post(app, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens"),
        ("/detokenize", {"tokens": [256]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, 404, "model"),
    ],
)
def test_faults_are_named(path: str, body: Any, status: int, param: str) -> None:
    response = post(make_app(), path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_tokenizer_info_has_what_the_codec_tells_of_itself() -> None:
    class Telling(ByteCodec):
        def tokenizer_info(self) -> dict[str, Any]:
            return {"eos_token": "</s>"}

    backend = ScriptedBackend()
    known = {"vocab_size": 256, "model_max_length": 64}
    assert get(make_app(backend), "/tokenizer_info").json() == known
    backend.codec = Telling()
    assert get(make_app(backend), "/tokenizer_info").json() == known | {"eos_token": "</s>"}
