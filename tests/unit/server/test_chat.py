"""Chat completions: shapes, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.asgi_client import chat, events_of, make_app
from tests.unit.server.scripted_backend import ScriptedBackend, says_it_reused

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 9,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def test_whole_answer_has_the_fields_that_clients_read() -> None:
    answer = chat(make_app(), model="legal").json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["created"] > 1_700_000_000
    assert answer["model"] == "legal"
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"] == "fp_0123456789ab"
    assert answer["usage"] == USAGE
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello you"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_answer_may_take_all_the_room_that_the_prompt_leaves() -> None:
    backend = ScriptedBackend()
    chat(make_app(backend))
    assert backend.requests[0].params.max_tokens == 64 - 7


def test_max_completion_tokens_cuts_the_answer_and_says_so() -> None:
    choice = chat(make_app(), max_tokens=50, max_completion_tokens=2).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "length")


def test_parts_of_text_are_read_like_a_string() -> None:
    backend = ScriptedBackend()
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}]
    assert chat(make_app(backend), messages=messages).status_code == 200
    assert bytes(backend.requests[0].prompt_token_ids) == b"u:hi\na:"


def test_generation_prompt_can_be_left_out() -> None:
    backend = ScriptedBackend()
    chat(make_app(backend), add_generation_prompt=False)
    assert bytes(backend.requests[0].prompt_token_ids) == b"u:hi\n"


def test_logprobs_carry_bytes_and_alternatives() -> None:
    app = make_app()
    content = chat(app, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("Hello you")
    assert content[0]["bytes"] == [72]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == ["A", "B"]
    alone = chat(app, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert alone[0]["top_logprobs"] == []


def test_every_choice_has_its_own_index_and_text() -> None:
    choices = chat(make_app(), n=3).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in choices} == {"Hello you"}


def deltas_of(chunks: list[Any], index: int) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


@pytest.mark.parametrize("n", [1, 2])
def test_stream_starts_with_the_role_and_ends_with_reason_and_done(n: int) -> None:
    response = chat(make_app(), stream=True, n=n)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    for index in range(n):
        deltas = deltas_of(chunks, index)
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [delta["content"] for delta in deltas[1:]] == ["Hel", "lo", " you"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-n:] == ["stop"] * n
    assert set(reasons[:-n]) == {None}


def test_usage_chunk_comes_last_and_without_choices() -> None:
    response = chat(make_app(), stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events_of(response.text)
    assert last["choices"] == []
    assert last["usage"] == USAGE
    assert not any("usage" in chunk for chunk in chunks)


def test_cached_tokens_are_in_complete_and_streamed_usage() -> None:
    """With two choices the prompt counts once: by the one that had to compute most of it."""
    app = make_app(ScriptedBackend(says_it_reused(4, 6)))
    assert chat(app).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert chat(app, n=2).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    response = chat(app, n=2, stream=True, stream_options={"include_usage": True})
    *_, last, _ = events_of(response.text)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_continuous_usage_counts_up_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events_of(chat(make_app(), stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 3, 5, 9, 9]


def test_streamed_logprobs_belong_to_their_chunk() -> None:
    *chunks, _ = events_of(chat(make_app(), stream=True, logprobs=True).text)
    tokens = [
        [
            entry["token"]
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        for chunk in chunks
    ]
    assert tokens == [[], list("Hel"), list("lo"), list(" you")]


def test_long_messages_are_read_off_the_loop_with_the_same_result() -> None:
    backend = ScriptedBackend()
    response = chat(make_app(backend), chat_template_kwargs={"notes": "x" * 10_000})
    assert response.status_code == 200
    assert bytes(backend.requests[0].prompt_token_ids) == b"u:hi\na:"
