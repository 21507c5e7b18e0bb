"""LoRAX's and TGI's routes: shapes, adapters, sampling and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loramux.backend.host import Health
from loramux.backend.text import Delta
from loramux.errors import (
    AdapterRefused,
    EngineBusy,
    LoramuxError,
    RequestTimeout,
    SourceNotFound,
    SourceRefused,
)
from loramux.server.app import create_app
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.naming.sources import AdapterSources
from loramux.sources.config import SourceConfig
from loramux.types.request import Request
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import events_of, get, make_app, post
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend, delta, named
from tests.unit.server.test_errors import failing_backend

SAID = "Hello you"


def generate(app: Any, path: str = "/generate", **parameters: Any) -> Any:
    return post(app, path, {"inputs": "hi", "parameters": parameters})


def params_of(**parameters: Any) -> Any:
    backend = ScriptedBackend()
    response = generate(make_app(backend), **parameters)
    assert response.status_code == 200, response.text
    return backend.requests[0].params


def test_the_answer_is_an_object_or_a_list_of_one() -> None:
    app = make_app()
    assert generate(app).json() == {"generated_text": SAID}
    assert generate(app, "/").json() == [{"generated_text": SAID}]


def test_details_have_tokens_prefill_and_alternatives() -> None:
    answer = generate(
        make_app(),
        details=True,
        decoder_input_details=True,
        return_k_alternatives=2,
        top_n_tokens=1,
        return_full_text=True,
        max_new_tokens=2,
        temperature=0.7,
        seed=3,
    ).json()
    assert answer["generated_text"] == "hiHe"
    details = answer["details"]
    assert (details["finish_reason"], details["prompt_tokens"]) == ("length", 2)
    assert (details["generated_tokens"], details["seed"]) == (2, 3)
    assert details["prefill"] == [
        {"id": ord("h"), "text": "h", "logprob": None},
        {"id": ord("i"), "text": "i", "logprob": -0.5},
    ]
    token = details["tokens"][0]
    assert (token["id"], token["text"], token["logprob"], token["special"]) == (
        72,
        "H",
        -0.5,
        False,
    )
    assert [one["id"] for one in token["alternative_tokens"]] == [65, 66]
    assert [[one["id"] for one in top] for top in details["top_tokens"]] == [[65], [65]]


def test_a_stop_string_stays_in_the_text_and_is_the_reason() -> None:
    async def stops(request: Request) -> AsyncIterator[Delta]:
        from dataclasses import replace

        from loramux.types.request import FinishReason

        assert request.params.stop == ("lo",) and request.params.include_stop_str_in_output
        yield replace(delta(request, 0, b"Hello", FinishReason.STOP), stop_reason="lo")

    answer = generate(make_app(ScriptedBackend(stops)), stop=["lo"], details=True).json()
    assert answer["generated_text"] == "Hello"
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_streams_have_one_event_per_token_and_the_text_last() -> None:
    for path, body in (
        ("/generate_stream", {"inputs": "hi", "parameters": {"details": True}}),
        ("/", {"inputs": "hi", "stream": True}),
    ):
        response = post(make_app(), path, body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert "".join(one["token"]["text"] for one in events) == SAID
        assert [one["generated_text"] for one in events] == [None] * 8 + [SAID]
        assert events[-1]["details"]["finish_reason"] == "eos_token"
        assert events[-1]["details"]["generated_tokens"] == 9


def test_errors_of_a_stream_are_its_events() -> None:
    response = post(make_app(), "/generate_stream", {"inputs": "x" * 70})
    assert response.status_code == 200
    [event] = events_of(response.text)
    assert event["error_type"] == "validation" and "maximum context length" in event["error"]

    async def breaks(request: Request) -> AsyncIterator[Delta]:
        yield delta(request, 0, b"He")
        raise EngineBusy("Full.")

    events = events_of(
        post(make_app(ScriptedBackend(breaks)), "/generate_stream", {"inputs": "x"}).text
    )
    assert events[-1]["error_type"] == "overloaded"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineBusy("x"), 429, "overloaded"),
        (AdapterRefused("a", "x"), 424, "generation"),
        (AdapterRefused("unequal_ranks", "x"), 422, "validation"),
        (SourceRefused("unknown_source", "x"), 422, "validation"),
        (SourceNotFound("x"), 424, "generation"),
        (RequestTimeout("x"), 424, "generation"),
        (LoramuxError("x"), 500, "incomplete_generation"),
    ],
)
def test_errors_have_the_words_that_clients_map(error: Exception, status: int, kind: str) -> None:
    response = generate(make_app(failing_backend(error)))
    assert (response.status_code, response.json()["error_type"]) == (status, kind)


def test_a_starting_engine_says_when_to_retry() -> None:
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    response = generate(make_app(backend))
    assert response.status_code == 503 and "retry-after" in response.headers


@pytest.mark.parametrize(
    ("parameters", "is_greedy"),
    [
        ({}, True),
        ({"do_sample": True}, False),
        ({"temperature": 0.5}, False),
        ({"temperature": 1.0}, True),
        ({"top_k": 3}, False),
        ({"top_p": 0.9}, False),
        ({"top_p": 1.0}, True),
        ({"do_sample": True, "temperature": 0}, True),
    ],
)
def test_generation_is_greedy_unless_it_samples(parameters: Any, is_greedy: bool) -> None:
    assert params_of(**parameters).is_greedy is is_greedy


def test_parameters_arrive_under_their_own_names() -> None:
    params = params_of(
        max_new_tokens=5,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        ignore_eos_token=True,
        truncate=1,
        seed=4,
        typical_p=1,
    )
    assert (params.max_tokens, params.repetition_penalty, params.seed) == (5, 1.5, 4)
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.5)
    assert params.ignore_eos
    assert params_of().max_tokens == 62


def test_truncate_keeps_the_last_tokens() -> None:
    backend = ScriptedBackend()
    generate(make_app(backend), truncate=1)
    assert backend.requests[0].prompt_token_ids == (ord("i"),)


def test_best_of_returns_the_likeliest_and_shows_the_others() -> None:
    answer = generate(make_app(), best_of=3, do_sample=True, details=True).json()
    assert len(answer["details"]["best_of_sequences"]) == 2


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 2},
        {"best_of": 2, "do_sample": True, "seed": 1},
        {"best_of": 0},
        {"typical_p": 0.5},
        {"watermark": True},
        {"truncate": 0},
        {"seed": -1},
        {"temperature": -1},
        {"top_p": 2},
        {"grammar": {"type": "regex", "value": "("}},
        {"response_format": {"type": "xml"}},
        {"adapter_id": "legal", "merged_adapters": {"ids": ["legal"]}},
        {"merged_adapters": {"ids": []}},
        {"merged_adapters": {"ids": ["legal"], "weights": [1, 2]}},
        {"lora_path": "x"},
        {"top_k": 0},
        {"max_new_tokens": 0},
        {"n": 2},
        {"logit_bias": {"5": 1}},
        {"max_new_tokens": "x"},
    ],
)
def test_what_cannot_be_honoured_is_a_validation_error(parameters: Any) -> None:
    response = generate(make_app(), **parameters)
    assert response.status_code == 422, response.text
    body = response.json()
    assert set(body) == {"error", "error_type"} and body["error_type"] == "validation"


def test_response_format_text_changes_nothing() -> None:
    assert generate(make_app(), response_format={"type": "text"}).status_code == 200


def test_adapters_by_name_and_in_headers() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    response = generate(app, adapter_id="legal")
    assert response.headers["x-adapter-id"] == "legal"
    assert response.headers["x-generated-tokens"] == "9"
    for base in ("", None, "tiny-base"):
        assert "x-adapter-id" not in generate(app, adapter_id=base).headers
    assert backend.cids == [named("legal").cid, None, None, None]


def test_an_unknown_adapter_is_a_failed_dependency() -> None:
    for parameters in ({"adapter_id": "nope"}, {"adapter_id": "a/b", "adapter_source": "hub"}):
        response = generate(make_app(), **parameters)
        assert (response.status_code, response.json()["error_type"]) == (424, "generation")


def test_a_name_of_the_registry_needs_no_source(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    assert generate(served.app, adapter_id="acme/sql").status_code == 200
    # With a source, another adapter is meant that must not be replaced by the registry's.
    assert generate(served.app, adapter_id="acme/sql", adapter_source="hub").status_code == 424
    assert served.backend.cids == [cid]


def test_a_tenant_finds_its_own_adapters_by_their_bare_names(registry_app: Make) -> None:
    served = registry_app(tenant_header="x-tenant")
    cid = served.push("acme/sql@1.0.0", 1)
    headers = {"x-tenant": "acme"}
    bodies: dict[str, Any] = {
        "/generate": {"inputs": "x", "parameters": {"adapter_id": "sql"}},
        "/api/chat": {"model": "sql:latest", "messages": [{"role": "user", "content": "x"}]},
        "/v1/messages/count_tokens": {"model": "sql", "messages": []},
    }
    for path, body in bodies.items():
        if "count" in path:
            body = body | {"messages": [{"role": "user", "content": "x"}]}
        assert post(served.app, path, body, headers=headers).status_code == 200, path
        assert post(served.app, path, body).status_code in (404, 424), path
    assert served.backend.cids == [cid, cid]


def sourced_app(tmp_path: Path, **options: Any) -> tuple[Any, ScriptedBackend]:
    backend = ScriptedBackend()
    config = SourceConfig(allowed_roots=(tmp_path / "allowed",))
    sources = AdapterSources(backend, backend.names, config, tmp_path / "area")
    app = create_app(
        backend,
        ServerOptions(**options),
        names=backend.names,
        on_demand=OnDemand(sources=sources),
    )
    return app, backend


def test_a_local_folder_is_served_under_the_allowed_roots(tmp_path: Path) -> None:
    inside, outside = write_tiny(tmp_path / "allowed" / "a"), write_tiny(tmp_path / "other")
    app, backend = sourced_app(tmp_path)
    for _ in range(2):
        response = generate(app, adapter_id=str(inside), adapter_source="local")
        assert response.status_code == 200
        assert response.headers["x-adapter-id"] == str(inside)
    assert backend.added == [str(inside)] and len(set(backend.cids)) == 1
    response = generate(app, adapter_id=str(outside), adapter_source="local")
    assert response.status_code == 424 and "outside the allowed roots" in response.json()["error"]


def test_the_server_may_have_a_source_of_its_own(tmp_path: Path) -> None:
    write_tiny(tmp_path / "allowed" / "a")
    app, backend = sourced_app(tmp_path, adapter_source="local")
    assert generate(app, adapter_id="a").status_code == 200
    assert generate(app, adapter_id="legal").status_code == 200
    assert backend.cids[1] == named("legal").cid and backend.cids[0] != backend.cids[1]


def test_tokens_have_their_places() -> None:
    tokens = post(make_app(), "/tokenize", {"inputs": "aé"}).json()
    assert [(one["id"], one["start"], one["stop"]) for one in tokens] == [
        (97, 0, 1),
        (195, 1, 1),
        (169, 1, 2),
    ]
    text = "aé😀b"
    tokens = post(make_app(), "/tokenize", {"inputs": text}).json()
    assert [text[one["start"] : one["stop"]] for one in tokens] == [
        *("a", "", "é", "", "", "", "😀", "b"),
    ]


def test_info_and_root() -> None:
    app = make_app()
    info = get(app, "/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == (
        "tiny-base",
        64,
        63,
    )
    assert get(app, "/").status_code == get(app, "/startup").status_code == 200
    backend = ScriptedBackend()
    backend.health = Health.STARTING
    app = make_app(backend)
    assert get(app, "/").status_code == get(app, "/startup").status_code == 503


def test_headers_count_characters_and_tell_the_times() -> None:
    headers = generate(make_app()).headers
    assert headers["x-compute-characters"] == str(len("hi"))
    assert 0 < float(headers["x-compute-time"]) < 60
    for name in ("total-time", "validation-time", "queue-time", "inference-time"):
        assert int(headers[f"x-{name}"]) >= 0
    for name in ("time-per-token", "time-to-first-token", "time-per-output-token"):
        assert int(headers[f"x-{name}"]) >= 0
    stream = post(make_app(), "/generate_stream", {"inputs": "hi"}).headers
    assert stream["x-compute-characters"] == str(len("hi"))


def test_the_model_of_a_body_is_an_adapter_unless_it_is_the_base() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    for model in ("legal", "tgi", "tiny-base"):
        assert post(app, "/", {"inputs": "hi", "model": model}).status_code == 200
    assert backend.cids == [named("legal").cid, None, None]


def test_inputs_may_be_put_into_the_chat_template() -> None:
    backend = ScriptedBackend()
    generate(make_app(backend), apply_chat_template=True)
    generate(make_app(backend))
    prompts = [bytes(one.prompt_token_ids) for one in backend.requests]
    assert prompts == [b"u:hi\na:", b"hi"]
