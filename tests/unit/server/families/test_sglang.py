"""SGLang's native routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.errors import EngineStopped
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import events_of, get, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend, named

SAID = "Hello you"
SHORT = {"max_new_tokens": 20}


def generate(app: Any, **fields: Any) -> Any:
    return post(app, "/generate", {"text": "hi", "sampling_params": SHORT} | fields)


def test_one_prompt_has_one_answer() -> None:
    answer = generate(make_app(), rid="mine").json()
    meta = answer.pop("meta_info")
    assert answer == {"text": SAID, "output_ids": list(SAID.encode())}
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": ord("u")}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 9, 0)


def test_a_limit_is_its_own_reason_and_the_default_is_128() -> None:
    answer = generate(make_app(), sampling_params={"max_new_tokens": 2}).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    backend = ScriptedBackend()
    generate(make_app(backend), sampling_params=None)
    # What fits into 64 tokens.
    assert backend.requests[0].params.max_tokens == 62


def test_lists_of_prompts_and_choices_are_lists() -> None:
    app = make_app()
    assert len(generate(app, text=["a", "b"]).json()) == 2
    both = {"text": None, "input_ids": [[1, 2], [3]]}
    assert [one["meta_info"]["prompt_tokens"] for one in generate(app, **both).json()] == [2, 1]
    assert len(generate(app, sampling_params={"n": 3, **SHORT}).json()) == 3


def test_each_prompt_may_have_its_own_adapter() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    assert generate(app, lora_path="legal").status_code == 200
    answers = generate(app, text=["a", "b"], lora_path=["legal", None]).json()
    assert [one["text"] for one in answers] == [SAID, SAID]
    by_prompt = {one.prompt_token_ids: one.selection for one in backend.requests[1:]}
    assert by_prompt == {(97,): ((named("legal").cid, 1.0),), (98,): ()}
    assert backend.cids[0] == named("legal").cid


def test_logprobs_of_answer_and_prompt() -> None:
    answer = generate(
        make_app(),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 1},
    ).json()["meta_info"]
    assert answer["input_token_logprobs"] == [[None, 104, "h"], [-0.5, 105, "i"]]
    assert answer["output_token_logprobs"] == [[-0.5, 72, "H"]]
    assert answer["output_top_logprobs"] == [[[-65.5, 65, "A"]]]
    only = generate(make_app(), return_logprob=True).json()["meta_info"]
    assert only["input_token_logprobs"] == [] and len(only["output_token_logprobs"]) == 9


def test_streams_are_cumulative() -> None:
    events = events_of(generate(make_app(), stream=True).text)
    assert [one["text"] for one in events[:-1]] == ["Hel", "Hello", SAID]
    assert events[-1] == "[DONE]" and events[-2]["meta_info"]["finish_reason"]["type"] == "stop"
    several = events_of(generate(make_app(), text=["a", "b"], stream=True).text)[:-1]
    assert {one["index"] for one in several} == {0, 1}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"lora_path": "nope"}, "nope"),
        ({"lora_path": ["legal"], "text": ["a", "b"]}, "lora_path"),
        ({"lora_path": ["legal", None], "text": ["a", "b"], "stream": True}, "lora_path"),
        ({"sampling_params": {"regex": "("}}, "regex"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf"),
        ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"sampling_params": {"min_new_tokens": -1}}, "min_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"session_params": {}}, "session_params"),
    ],
)
def test_errors_are_bad_requests_with_a_message(fields: Any, word: str) -> None:
    response = generate(make_app(), **fields)
    assert response.status_code == 400
    assert set(response.json()) == {"error"} and word in response.json()["error"]["message"]


def test_adapters_are_loaded_pinned_and_unloaded(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    backend = ScriptedBackend()
    app = make_app(backend, allow_runtime_lora_updating=True)
    body = {"lora_name": "new", "lora_path": str(folder)}
    reply = post(app, "/load_lora_adapter", body).json()
    assert reply["success"] and reply["error_message"] == ""
    assert reply["loaded_adapters"]["new"] == str(folder)
    assert generate(app, lora_path="new").status_code == 200
    again = post(app, "/load_lora_adapter", body)
    assert again.status_code == 400 and "already loaded" in again.json()["error_message"]
    assert post(app, "/unload_lora_adapter", {"lora_name": "new"}).json()["success"]
    gone = post(app, "/unload_lora_adapter", {"lora_name": "new"})
    assert (gone.status_code, gone.json()["success"]) == (400, False)


def test_adapters_are_not_changed_unless_allowed() -> None:
    body = {"lora_name": "x", "lora_path": "/x"}
    assert post(make_app(), "/load_lora_adapter", body).status_code == 404


def test_info_health_and_flush() -> None:
    app = make_app()
    for path in ("/get_model_info", "/model_info"):
        assert get(app, path).json()["served_model_name"] == "tiny-base"
    assert get(app, "/health_generate").content == b""
    assert post(app, "/flush_cache").status_code == 200
    backend = ScriptedBackend()

    def fail(timeout_s: float) -> dict[str, float]:
        raise EngineStopped("no")

    backend.probe_script = fail
    assert get(make_app(backend), "/health_generate").status_code == 503


def test_what_balancers_and_trainers_ask() -> None:
    app = make_app()
    assert get(app, "/load").json() == {"server_load": 0}
    for path in ("/server_info", "/get_server_info"):
        info = get(app, path).json()
        assert (info["context_length"], info["is_generation"]) == (64, True)
    assert post(app, "/reset_prefix_cache").status_code == 200
