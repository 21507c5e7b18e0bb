"""llama.cpp's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.asgi_client import events_of, get, make_app, post, request
from tests.unit.server.scripted_backend import ScriptedBackend, named

SAID = "Hello you"
LEGAL, POLITE = named("legal").cid, named("team/polite").cid


def complete(app: Any, **fields: Any) -> Any:
    return post(app, "/completion", {"prompt": "hi"} | fields)


def test_a_completion_says_why_it_stopped() -> None:
    answer = complete(make_app(), return_tokens=True).json()
    assert (answer["content"], answer["tokens"]) == (SAID, list(SAID.encode()))
    assert (answer["stop"], answer["stop_type"], answer["model"]) == (True, "eos", "tiny-base")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (9, 2)
    assert complete(make_app(), n_predict=2).json()["stop_type"] == "limit"


def test_defaults_are_those_of_llamacpp() -> None:
    backend = ScriptedBackend()
    complete(make_app(backend), seed=-1)
    params = backend.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.max_tokens, params.seed) == (62, None)


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [(97, 98)]),
        ([1, 2], [(1, 2)]),
        ([1, "a", 2], [(1, 97, 2)]),
        (["a", [1], "b"], [(97,), (1,), (98,)]),
    ],
)
def test_prompts_may_be_mixed(prompt: Any, token_ids: Any) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), prompt=prompt).json()
    assert sorted(one.prompt_token_ids for one in backend.requests) == sorted(token_ids)
    assert isinstance(answer, list) is (len(token_ids) > 1)


def test_streams_end_with_the_whole_report() -> None:
    events = events_of(complete(make_app(), stream=True).text)
    assert "".join(one["content"] for one in events) == SAID
    assert [one["stop"] for one in events] == [False, False, False, True]
    assert events[-1]["stop_type"] == "eos"


def test_probabilities_of_tokens() -> None:
    [first] = complete(make_app(), n_probs=1, n_predict=1).json()["completion_probabilities"]
    assert (first["id"], first["token"], first["logprob"]) == (72, "H", -0.5)
    assert [one["id"] for one in first["top_logprobs"]] == [65]


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"grammar": "root ::= x"},
        {"json_schema": {}},
        {"repeat_penalty": 1.1, "repeat_last_n": 64},
        {"prompt": {}},
        {"prompt": ["a", "b"], "stream": True},
        {"lora": {"id": 0}},
        {"lora": [{"id": 9, "scale": 1}]},
        {"lora": [{"scale": 1}]},
        {"lora": [{"id": 0, "scale": "x"}]},
        {"logit_bias": [1]},
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: Any) -> None:
    response = complete(make_app(), **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_inactive_samplers_are_accepted() -> None:
    fields = {"mirostat": 0, "xtc_probability": 0, "typical_p": 1, "repeat_penalty": 1.0}
    assert complete(make_app(), cache_prompt=True, id_slot=-1, **fields).status_code == 200


def test_a_too_long_prompt_has_a_type_of_its_own() -> None:
    error = complete(make_app(), prompt="x" * 70).json()["error"]
    assert error["type"] == "exceed_context_size_error"


def test_adapters_are_chosen_by_place_or_name() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    complete(app, lora=[{"id": 1, "scale": 0.5}, {"id": "legal", "scale": 2}])
    complete(app, lora=[])
    complete(app, model="legal")
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "lora": [{"id": 0, "scale": 1}]}
    assert post(app, "/chat/completions", body).status_code == 200
    assert [one.selection for one in backend.requests] == [
        ((LEGAL, 2.0), (POLITE, 0.5)),
        (),
        ((LEGAL, 1.0),),
        ((LEGAL, 1.0),),
    ]


def test_the_default_selection_is_for_requests_without_one() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, allow_runtime_lora_updating=True)
    assert post(app, "/lora-adapters", [{"id": 1, "scale": 0.5}]).json() == {"success": True}
    assert [one["scale"] for one in get(app, "/lora-adapters").json()] == [0.0, 0.5]
    complete(app)
    complete(app, lora=[{"id": 0, "scale": 1}])
    complete(app, model="legal")
    assert [one.selection for one in backend.requests] == [
        ((POLITE, 0.5),),
        ((LEGAL, 1.0),),
        ((LEGAL, 1.0),),
    ]
    post(app, "/lora-adapters", [])
    complete(app)
    assert backend.requests[-1].selection == ()


def test_the_default_selection_changes_only_if_allowed() -> None:
    response = post(make_app(), "/lora-adapters", [{"id": 0, "scale": 1}])
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_a_place_is_never_given_again() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, allow_runtime_lora_updating=True)
    assert len(get(app, "/lora-adapters").json()) == 2
    post(app, "/v1/unload_lora_adapter", {"lora_name": "legal"})
    assert [one["id"] for one in get(app, "/lora-adapters").json()] == [1]
    assert complete(app, lora=[{"id": 0, "scale": 1}]).status_code == 400


def test_bodies_need_no_content_type() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"prompt": "hi"})
    assert request(make_app(), "POST", "/completion", content=body, headers=form).status_code == 200
    # It changes the server: a form of a web page must not reach it.
    changed = request(
        make_app(allow_runtime_lora_updating=True),
        "POST",
        "/lora-adapters",
        content="[]",
        headers=form,
    )
    assert changed.status_code == 415


def test_paths_without_a_version() -> None:
    app = make_app()
    assert get(app, "/models").json()["data"] == get(app, "/v1/models").json()["data"]
    assert get(app, "/v1/health").json() == {"status": "ok"}
    assert get(app, "/props").json()["default_generation_settings"]["n_ctx"] == 64
    assert post(app, "/tokenize", {"content": "hi"}).json() == {"tokens": [104, 105]}
    pieces = post(app, "/tokenize", {"content": "h", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}]
