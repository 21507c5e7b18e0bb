"""B3: the default length of answers to `inputs`, and feature extraction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loramux.backend.text import Delta
from loramux.types.pooling import ModelPooling, Pooling
from loramux.types.request import FinishReason, Request
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import CARD, ScriptedBackend, named, say_hello

VECTOR = np.array([3, 4], dtype="<f4")
UNIT = [0.6000000238418579, 0.800000011920929]


async def answer(request: Request) -> AsyncIterator[Delta]:
    if request.pooling is None:
        async for delta in say_hello(request):
            yield delta
        return
    yield Delta(
        index=0,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=FinishReason.LENGTH,
        pooled=VECTOR.tobytes(),
    )


def backend_of(pooling: ModelPooling, max_model_len: int = 64) -> ScriptedBackend:
    backend = ScriptedBackend(answer)
    backend.card = replace(CARD, pooling=pooling, max_model_len=max_model_len)
    return backend


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/invocations"])
def test_an_answer_to_inputs_has_as_many_tokens_as_with_tgi(path: str) -> None:
    backend = backend_of(ModelPooling(), max_model_len=4096)
    assert post(make_app(backend), path, {"inputs": "a"}).status_code == 200
    assert backend.requests[0].params.max_tokens == 100
    asked = {"inputs": "a", "parameters": {"max_new_tokens": 200}}
    assert post(make_app(backend), path, asked).status_code == 200
    assert backend.requests[1].params.max_tokens == 200


def test_the_default_length_is_what_fits_if_that_is_less() -> None:
    backend = backend_of(ModelPooling(), max_model_len=64)
    assert post(make_app(backend), "/", {"inputs": "abcd"}).status_code == 200
    assert backend.requests[0].params.max_tokens == 60


@pytest.mark.parametrize("path", ["/", "/invocations"])
@pytest.mark.parametrize(
    ("fields", "vectors"),
    [
        ({"inputs": "a"}, [UNIT]),
        ({"inputs": ["a", "b"]}, [UNIT, UNIT]),
        ({"inputs": "a", "normalize": True, "truncate": True}, [UNIT]),
        ({"inputs": "a", "normalize": False}, [[3.0, 4.0]]),
    ],
)
def test_features_are_a_list_of_vectors(path: str, fields: dict[str, Any], vectors: Any) -> None:
    app = make_app(backend_of(ModelPooling(pooling=Pooling.LAST)))
    response = post(app, path, fields)
    assert (response.status_code, response.json()) == (200, vectors)


def test_a_long_input_is_cut_at_the_asked_end() -> None:
    backend = backend_of(ModelPooling(pooling=Pooling.LAST))
    app, text = make_app(backend), "ab" + "x" * 90 + "yz"
    assert post(app, "/", {"inputs": text}).status_code == 422
    for direction, start in ((None, b"ab"), ("Right", b"ab"), ("left", b"xx")):
        body = {"inputs": text, "truncate": True, "truncation_direction": direction}
        assert post(app, "/", body).status_code == 200
        assert bytes(backend.requests[-1].prompt_token_ids).startswith(start)


def test_generations_of_a_model_that_pools_too() -> None:
    app = make_app(backend_of(ModelPooling(pooling=Pooling.LAST)))
    for fields in ({"parameters": {}}, {"stream": False}, {"model": "legal"}):
        response = post(app, "/", {"inputs": "a"} | fields)
        assert response.json() == [{"generated_text": "Hello you"}]


def test_features_of_an_adapter_where_the_model_does_not_generate() -> None:
    backend = backend_of(ModelPooling(pooling=Pooling.LAST, generates=False))
    body = {"inputs": "a", "parameters": {"adapter_id": "legal"}}
    assert post(make_app(backend), "/", body).json() == [UNIT]
    assert backend.cids == [named("legal").cid]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": []}, "inputs is an empty list"),
        ({"inputs": "a", "prompt_name": "query"}, "put it into the input"),
        ({"inputs": "a", "dimensions": 1}, "Matryoshka"),
        ({"inputs": 5}, "inputs"),
    ],
)
def test_features_that_cannot_be_given_are_refused(fields: dict[str, Any], text: str) -> None:
    response = post(make_app(backend_of(ModelPooling(pooling=Pooling.LAST))), "/", fields)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert text in response.json()["error"]
