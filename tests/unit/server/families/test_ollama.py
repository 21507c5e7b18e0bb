"""Ollama's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.asgi_client import get, make_app, post, request
from tests.unit.server.scripted_backend import ScriptedBackend, named
from tests.unit.server.test_streaming import dies_after_two

SAID = "Hello you"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(app: Any, **fields: Any) -> Any:
    return post(app, "/api/chat", {"model": "legal", "messages": MESSAGES} | fields)


def generate(app: Any, **fields: Any) -> Any:
    return post(app, "/api/generate", {"model": "legal", "prompt": "hi"} | fields)


def lines(response: Any) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_streams_are_lines_and_the_default() -> None:
    answers = lines(chat(make_app()))
    assert "".join(one["message"]["content"] for one in answers) == SAID
    assert [one["done"] for one in answers] == [False, False, False, True]
    last = answers[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 7, 9)
    assert last["total_duration"] > 0
    assert "".join(one["response"] for one in lines(generate(make_app()))) == SAID


def test_whole_answers() -> None:
    answer = chat(make_app(), stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": SAID} and answer["done"]
    answer = generate(make_app(), stream=False, options={"num_predict": 2}).json()
    assert (answer["response"], answer["done_reason"]) == ("He", "length")


@pytest.mark.parametrize("model", ["legal", "legal:latest", "tiny-base:legal"])
def test_adapters_have_names_with_and_without_a_tag(model: str) -> None:
    backend = ScriptedBackend()
    assert chat(make_app(backend), model=model, stream=False).json()["model"] == model
    assert backend.cids == [named("legal").cid]


def test_options_and_their_defaults() -> None:
    backend = ScriptedBackend()
    options = {"temperature": 0, "seed": 3, "stop": ["x"], "repeat_penalty": 1.5, "num_ctx": 2048}
    chat(make_app(backend), options=options, keep_alive="5m", think=False)
    chat(make_app(backend))
    first, second = (one.params for one in backend.requests)
    assert (first.temperature, first.seed, first.stop) == (0, 3, ("x",))
    assert first.repetition_penalty == 1.5 and second.repetition_penalty == 1
    assert (second.temperature, second.top_k, second.top_p) == (0.8, 40, 0.9)


def test_generate_uses_the_template_unless_it_is_raw() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    generate(app, system="be")
    generate(app, raw=True)
    prompts = [bytes(one.prompt_token_ids) for one in backend.requests]
    assert prompts == [b"s:be\nu:hi\na:", b"hi"]


def test_nothing_to_say_loads_the_model() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    for answer in (chat(app, messages=[]), generate(app, prompt="")):
        assert answer.json()["done_reason"] == "load"
    assert backend.requests == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nope"}, 404),
        ({"format": "json"}, 400),
        ({"format": {"type": "object"}}, 400),
        ({"think": True}, 400),
        ({"tools": [{"type": "function"}]}, 400),
        ({"options": {"mirostat": 1}}, 400),
        ({"options": {"temperature": "x"}}, 400),
        ({"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, 400),
        ({"messages": [{"role": "user", "content": "x" * 70}]}, 400),
    ],
)
def test_errors_are_a_text(fields: Any, status: int) -> None:
    response = chat(make_app(), **fields)
    assert response.status_code == status, response.text
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("name", ["images", "template", "context", "suffix"])
def test_parts_of_generate_that_are_not_here_are_refused(name: str) -> None:
    value = [1] if name == "context" else ["x"] if name == "images" else "x"
    response = generate(make_app(), **{name: value})
    assert response.status_code == 400 and name in response.json()["error"]


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    answers = lines(chat(make_app(ScriptedBackend(dies_after_two))))
    assert "died" in answers[-1]["error"]
    assert not any(one.get("done") for one in answers)


def test_models_are_listed_and_shown() -> None:
    app = make_app()
    models = get(app, "/api/tags").json()["models"]
    assert [one["name"] for one in models] == ["tiny-base", "legal", "team/polite"]
    assert models[1]["digest"] == named("legal").cid.rpartition(":")[2]
    shown = post(app, "/api/show", {"model": "legal:latest"}).json()
    assert shown["details"]["parent_model"] == "tiny-base"
    assert shown["model_info"]["context_length"] == 64
    assert post(app, "/api/show", {"model": "nope"}).status_code == 404
    assert get(app, "/api/ps").json()["models"][0]["name"] == "tiny-base"
    assert "version" in get(app, "/api/version").json()


def test_root_says_that_it_runs() -> None:
    assert get(make_app(), "/").text == "Ollama is running"
    assert request(make_app(), "HEAD", "/").status_code == 200


def test_bodies_need_no_content_type() -> None:
    body = json.dumps({"model": "legal", "messages": MESSAGES})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = request(make_app(), "POST", "/api/chat", content=body, headers=headers)
    assert response.status_code == 200
