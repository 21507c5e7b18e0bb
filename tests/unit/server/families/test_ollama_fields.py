"""B8: keep_alive, log probabilities and errors of Ollama's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.server.families.ollama import is_zero
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend

CHAT: dict[str, Any] = {"model": "legal", "messages": [{"role": "user", "content": "x"}]}
ROUTES = [("/api/chat", CHAT), ("/api/generate", {"model": "legal", "prompt": "x"})]
EMPTY = [("/api/chat", CHAT | {"messages": []}), ("/api/generate", {"model": "legal"})]
SAID = list("Hello you")


@pytest.mark.parametrize(("path", "body"), EMPTY)
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (0, "unload"),
        ("0", "unload"),
        ("0s", "unload"),
        ("0h0m", "unload"),
        (-1, "load"),
        ("5m", "load"),
        ("1h30m", "load"),
        (None, "load"),
    ],
)
def test_keep_alive_of_0_unloads_in_ollamas_words(
    path: str, body: Any, keep_alive: Any, reason: str
) -> None:
    answer = post(make_app(), path, body | {"keep_alive": keep_alive})
    assert (answer.status_code, answer.json()["done_reason"]) == (200, reason)
    assert answer.json()["done"] is True


@pytest.mark.parametrize("keep_alive", ["soon", "5 minutes", True, [], {}])
@pytest.mark.parametrize(("path", "body"), [*EMPTY, *ROUTES])
def test_keep_alive_that_is_no_time_is_refused(path: str, body: Any, keep_alive: Any) -> None:
    backend = ScriptedBackend()
    answer = post(make_app(backend), path, body | {"keep_alive": keep_alive})
    assert answer.status_code == 400 and not backend.requests
    assert answer.json()["error"].startswith("time: invalid duration")


@pytest.mark.parametrize(("path", "body"), EMPTY)
def test_a_model_that_is_not_there_is_neither_loaded_nor_unloaded(path: str, body: Any) -> None:
    answer = post(make_app(), path, body | {"model": "nope", "keep_alive": 0})
    assert answer.status_code == 404 and "model 'nope' not found" in answer.json()["error"]


def test_numbers_are_seconds() -> None:
    assert is_zero(0.0) and not is_zero(0.5) and is_zero("0.0s") and not is_zero("0.5s")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_log_probabilities_of_whole_answers(path: str, body: Any) -> None:
    fields = {"stream": False, "logprobs": True, "top_logprobs": 2}
    answer = post(make_app(), path, body | fields).json()
    assert [one["token"] for one in answer["logprobs"]] == SAID
    assert answer["logprobs"][0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "A", "logprob": -65.5, "bytes": [65]},
            {"token": "B", "logprob": -66.5, "bytes": [66]},
        ],
    }
    plain = post(make_app(), path, body | {"stream": False, "logprobs": True}).json()
    assert "top_logprobs" not in plain["logprobs"][0]
    assert "logprobs" not in post(make_app(), path, body | {"stream": False}).json()


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_log_probabilities_of_streams(path: str, body: Any) -> None:
    text = post(make_app(), path, body | {"logprobs": True}).text
    parts = [json.loads(line).get("logprobs", []) for line in text.splitlines()]
    assert [one["token"] for part in parts for one in part] == SAID
    assert len(parts[0]) == len("Hel")


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": -1}],
)
def test_log_probabilities_that_cannot_be_given_are_refused(fields: Any) -> None:
    answer = post(make_app(), "/api/chat", CHAT | fields)
    assert answer.status_code == 400 and "top_logprobs" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", CHAT | {"messages": [{"role": "user", "content": "x" * 99}]}),
        ("/api/generate", {"model": "legal", "prompt": "x" * 99}),
        ("/api/generate", {"model": "legal", "prompt": "x", "options": {"num_predict": 99}}),
    ],
)
def test_a_context_that_is_exceeded_is_said_in_litellms_words(path: str, body: Any) -> None:
    """LiteLLM's check of texts looks for these words."""
    answer = post(make_app(), path, body)
    assert answer.status_code == 400
    assert "This model's maximum context length is 64 tokens" in answer.json()["error"]
    assert "context_length_exceeded" in answer.json()["error"]
