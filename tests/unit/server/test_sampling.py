"""Request fields arrive in SamplingParams unchanged; defaults are the engine's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loramux.errors import InvalidRequest
from loramux.server.generate.checked_fields import FOREIGN_FIELDS
from loramux.server.generate.sampling import (
    MaxTokens,
    chat_logprobs_of,
    completion_logprobs_of,
    max_tokens_of,
    sampling_params,
)
from loramux.types.sampling import SamplingParams
from loramux.wire.text import ChatRequest, CompletionRequest
from tests.unit.server.asgi_client import chat, complete, make_app

GIVEN: dict[str, Any] = {
    "n": 3,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "seed": 0,
    "repetition_penalty": 1.5,
    "frequency_penalty": -1.0,
    "presence_penalty": 2.0,
    "logit_bias": {5: -100.0},
    "stop_token_ids": (1, 2),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "stop": ("a", "b"),
}


def params(**fields: Any) -> SamplingParams:
    body = CompletionRequest(prompt="", **fields)
    return sampling_params(body, completion_logprobs_of(body), vocab_size=100)


@pytest.mark.parametrize("name", GIVEN)
def test_field_arrives(name: str) -> None:
    assert getattr(params(**GIVEN), name) == GIVEN[name]


def test_absent_fields_leave_the_defaults() -> None:
    assert params() == SamplingParams()


def test_one_stop_string_is_not_taken_letter_by_letter() -> None:
    assert params(stop="end").stop == ("end",)


def test_top_k_beyond_the_vocabulary_is_the_vocabulary() -> None:
    assert params(top_k=10**30).top_k == 100
    assert params(top_k=-1).top_k == -1


def test_prompt_logprobs_come_with_echo_only() -> None:
    assert (params(logprobs=2).logprobs, params(logprobs=2).prompt_logprobs) == (2, None)
    assert params(logprobs=2, echo=True).prompt_logprobs == 2
    assert params(echo=True).prompt_logprobs is None


def test_chat_logprobs_count_alternatives() -> None:
    def of(**fields: Any) -> int | None:
        body = ChatRequest(messages=[], **fields)
        return sampling_params(body, chat_logprobs_of(body), vocab_size=9).logprobs

    assert of() is None
    assert of(logprobs=True) == 0
    assert of(logprobs=True, top_logprobs=5) == 5
    assert of(logprobs=False, top_logprobs=0) is None


def test_max_completion_tokens_wins_and_is_named() -> None:
    both = CompletionRequest(prompt="", max_tokens=1, max_completion_tokens=2)
    assert max_tokens_of(both) == MaxTokens(2, "max_completion_tokens")
    assert max_tokens_of(CompletionRequest(prompt="")) == MaxTokens(None)
    with pytest.raises(InvalidRequest, match="max_completion_tokens"):
        max_tokens_of(CompletionRequest(prompt="", max_completion_tokens=-1))


OWN = {field.name for field in msgspec.structs.fields(ChatRequest)}


@pytest.mark.parametrize("name", sorted(FOREIGN_FIELDS.keys() - OWN))
def test_harmless_values_of_unsupported_fields_are_accepted(name: str) -> None:
    app = make_app()
    for value in FOREIGN_FIELDS[name].harmless:
        assert chat(app, **{name: value}).status_code == 200
    response = chat(app, **{name: "something"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_best_of_that_equals_n_is_no_search() -> None:
    assert complete(make_app(), n=2, best_of=2).status_code == 200
    assert complete(make_app(), n=2, best_of=3).status_code == 400
