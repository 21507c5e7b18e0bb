"""B4 and B7: what Responses include, and log probabilities of their text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.tools.test_tools import WEATHER, backend_saying

LOGPROBS = "message.output_text.logprobs"
ASKED: dict[str, Any] = {"model": "legal", "input": "x", "include": [LOGPROBS], "top_logprobs": 1}
SAID = list("Hello you")


def respond(**fields: Any) -> Any:
    return post(make_app(), "/v1/responses", ASKED | fields)


def test_the_text_has_its_log_probabilities() -> None:
    answer = respond().json()
    [part] = answer["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == SAID
    assert part["logprobs"][0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [{"token": "A", "logprob": -65.5, "bytes": [65]}],
    }
    assert answer["top_logprobs"] == 1
    plain = respond(include=None, top_logprobs=None).json()["output"][0]["content"][0]
    assert plain["logprobs"] == []


def test_streams_report_tokens_once_in_deltas_and_whole_at_the_end() -> None:
    blocks = respond(stream=True).text.strip().split("\n\n")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    deltas = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
    assert [token["token"] for delta in deltas for token in delta] == SAID
    [done] = [one for one in events if one["type"] == "response.output_text.done"]
    whole = events[-1]["response"]["output"][0]["content"][0]
    assert [one["token"] for one in done["logprobs"]] == SAID
    assert whole["logprobs"] == done["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"include": None}, "top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"]'),
        ({"top_logprobs": 65}, "top_logprobs", "must be 0 to"),
        ({"top_logprobs": -1}, "top_logprobs", "must be 0 to"),
        ({"include": ["message.wobble"]}, "include", "include has no 'message.wobble'"),
    ],
)
def test_what_cannot_be_included_is_refused_with_its_reason(
    fields: Any, param: str, text: str
) -> None:
    error = respond(**fields).json()["error"]
    assert (error["code"], error["param"]) == (400, param) and text in error["message"]
    assert "keeps no responses" not in error["message"]


def test_log_probabilities_are_for_text_alone() -> None:
    tools = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    answer = post(make_app(backend_saying("x")), "/v1/responses", ASKED | {"tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


def test_what_codex_includes_changes_nothing() -> None:
    include = ["reasoning.encrypted_content"]
    assert respond(include=include, top_logprobs=None).status_code == 200
