"""Tokens for tools that count them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.server.asgi_client import get, make_app, post
from tests.unit.server.scripted_backend import ByteCodec, ScriptedBackend, named

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


class UpperCodec(ByteCodec):
    """A tokenizer whose texts are in capitals."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.upper().encode())

    def token_to_str(self, token_id: int) -> str:
        return f"<{token_id}>"


def test_every_route_uses_the_tokenizer_of_the_adapter() -> None:
    backend = ScriptedBackend()
    backend.codecs[named("legal").cid] = UpperCodec()
    app = make_app(backend)
    prompt = {"model": "legal", "prompt": "ab", "logprobs": 0}
    tokens = post(app, "/v1/completions", prompt).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens[0] == "<72>"
    post(app, "/v1/chat/completions", {"model": "legal", "messages": MESSAGES})
    post(app, "/v1/run", {"artifact": "legal", "input": "ab", "raw": True})
    post(app, "/v1/completions", {"model": "team/polite", "prompt": "ab"})
    prompts = [bytes(request.prompt_token_ids) for request in backend.requests]
    assert prompts == [b"AB", b"U:HI\nA:", b"AB", b"ab"]


def test_token_ids_are_checked_against_the_vocabulary_of_the_adapter() -> None:
    backend = ScriptedBackend()
    wider = replace(named("legal"), vocab_size=258)
    backend.give_name("legal", wider)
    app = make_app(backend)

    def status(model: str, token_id: int, **fields: Any) -> int:
        body = {"model": model, "prompt": [token_id], **fields}
        return int(post(app, "/v1/completions", body).status_code)

    assert (status("legal", 257), status("legal", 258), status("team/polite", 257)) == (
        200,
        400,
        400,
    )
    assert status("legal", 1, logit_bias={"257": 1}, stop_token_ids=[257]) == 200
    assert status("team/polite", 1, logit_bias={"257": 1}) == 400


def test_a_prompt_of_one_tokenizer_is_not_sent_to_an_adapter_with_another() -> None:
    """A reload moves the name while the prompt is tokenized."""
    backend = ScriptedBackend()
    backend.give_name("legal", replace(named("legal"), tokenizer_digest="sha256:old"))

    class Moving(UpperCodec):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            moved = replace(named("legal"), cid="cidv1:sha256:new", tokenizer_digest="sha256:new")
            backend.give_name("legal", moved)
            del backend.adapters[named("legal").cid]
            return super().encode(text)

    backend.codecs[named("legal").cid] = Moving()
    response = post(make_app(backend), "/v1/completions", {"model": "legal", "prompt": "ab"})
    assert response.status_code == 422 and not backend.requests
    assert "Send the request again" in response.json()["error"]["message"]
