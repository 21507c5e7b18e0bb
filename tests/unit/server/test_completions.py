"""Completions: the four forms of a prompt, echo, logprobs, and order in a stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.asgi_client import complete, events_of, make_app
from tests.unit.server.scripted_backend import ScriptedBackend, says_it_reused


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
def test_every_form_of_prompt_becomes_jobs_in_order(prompt: Any, expected: list[bytes]) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), prompt, n=2).json()
    assert [bytes(job.prompt_token_ids) for job in backend.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 9 * 2 * len(expected)


def test_whole_answer_has_the_fields_that_clients_read() -> None:
    answer = complete(make_app()).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny-base"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello you",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_default_length_is_sixteen_or_what_fits() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    complete(app, "hi")
    complete(app, "x" * 60)
    assert [job.params.max_tokens for job in backend.requests] == [16, 4]


def test_echo_puts_the_prompt_first_as_text_or_from_its_tokens() -> None:
    app = make_app()
    assert complete(app, "ab", echo=True).json()["choices"][0]["text"] == "abHello you"
    assert complete(app, [97, 98], echo=True).json()["choices"][0]["text"] == "abHello you"


def test_echo_with_logprobs_scores_the_prompt_but_for_its_first_token() -> None:
    backend = ScriptedBackend()
    response = complete(make_app(backend), "abc", echo=True, logprobs=1, max_tokens=1)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "H"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"A": -65.5, "b": -0.5}
    assert backend.requests[0].params.prompt_logprobs == 1


def test_choices_of_a_prompt_repeat_its_log_probabilities_and_go_on_from_there() -> None:
    answer = complete(make_app(), ["abc", "de"], n=2, echo=True, logprobs=1, max_tokens=1).json()
    shown = [choice["logprobs"] for choice in answer["choices"]]
    assert [one["tokens"] for one in shown] == [["a", "b", "c", "H"]] * 2 + [["d", "e", "H"]] * 2
    assert [one["text_offset"] for one in shown] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2
    assert shown[0] == shown[1] and shown[2] == shown[3]


def test_log_probabilities_of_too_many_prompt_tokens_are_refused() -> None:
    backend = ScriptedBackend()
    fields = {"echo": True, "logprobs": 64, "n": 128, "max_tokens": 1}
    response = complete(make_app(backend), "x" * 60, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    assert not backend.requests
    assert complete(make_app(backend), "x" * 60, **fields | {"n": 1}).status_code == 200


def test_ids_that_every_prompt_takes_to_the_engine_are_bounded_together() -> None:
    backend = ScriptedBackend()
    prompts = ["a"] * 1024
    fields = {"stop_token_ids": [1] * 1024, "max_tokens": 1}
    response = complete(make_app(backend), prompts, **fields)
    assert response.status_code == 400
    assert "stop_token_ids" in response.json()["error"]["message"]
    assert not backend.requests
    assert complete(make_app(backend), prompts[:128], **fields).status_code == 200


def test_scoring_may_use_the_whole_context() -> None:
    response = complete(make_app(), "x" * 64, echo=True, logprobs=0, max_tokens=0)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "x" * 64


def test_logprobs_without_echo_leave_the_prompt_alone() -> None:
    backend = ScriptedBackend()
    response = complete(make_app(backend), "ab", logprobs=0)
    assert response.json()["choices"][0]["logprobs"]["tokens"] == list("Hello you")
    assert backend.requests[0].params.prompt_logprobs is None


def test_stream_of_two_prompts_gives_each_choice_its_own_text() -> None:
    response = complete(make_app(), ["a", "b"], n=2, stream=True, echo=True, logprobs=0)
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    texts = dict.fromkeys(range(4), "")
    offsets: dict[int, list[int]] = {index: [] for index in range(4)}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == {0: "aHello you", 1: "aHello you", 2: "bHello you", 3: "bHello you"}
    assert offsets[3] == list(range(10))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons.count("stop") == 4


def test_usage_chunk_counts_all_prompts() -> None:
    options = {"include_usage": True}
    response = complete(make_app(), ["a", "bc"], stream=True, stream_options=options)
    *_, last, _ = events_of(response.text)
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 18,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert last["choices"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_from_the_prefix_cache_add_up_over_prompts(stream: bool) -> None:
    app = make_app(ScriptedBackend(says_it_reused(2)))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = complete(app, ["abc", "abcd"], stream=stream, **options)
    usage = events_of(response.text)[-2]["usage"] if stream else response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
