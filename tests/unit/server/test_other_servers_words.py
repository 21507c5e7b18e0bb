"""Small differences between servers: words, names of the base, content parts, methods."""

from __future__ import annotations

import re
from typing import Any

import pytest

from loramux.server.families import (
    anthropic,
    llamacpp,
    lorax_embed,
    lorax_wire,
    ollama,
    ollama_embed,
    responses,
    sglang,
)
from loramux.server.generate.checked_fields import FOREIGN_FIELDS, unsupported_in
from loramux.wire import pooling as wire_pooling
from loramux.wire import text as wire
from tests.unit.server.asgi_client import (
    chat,
    complete,
    events_of,
    make_app,
    post,
    post_each,
    request,
)
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend, named

MESSAGES = [{"role": "user", "content": "x"}]
MAXIMUM = "This model's maximum context length is 64 tokens. However, you requested "


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": "x" * 64}, "prompt"), ({"max_tokens": 63}, "max_tokens")],
)
def test_too_long_is_said_in_words_that_clients_look_for(fields: Any, param: str) -> None:
    error = complete(make_app(), **fields).json()["error"]
    assert error["message"].startswith(MAXIMUM)
    assert "context_length_exceeded" in error["message"]
    assert (error["reason"], error["param"]) == ("context_length_exceeded", param)


def test_far_too_long_text_is_refused_in_the_same_words() -> None:
    error = chat(make_app(), "x" * 100_000).json()["error"]
    assert error["message"].startswith(MAXIMUM) and error["reason"] == "context_length_exceeded"


@pytest.mark.parametrize("model", ["", "dummy", "tgi", None])
def test_models_that_name_nothing_are_the_base(model: str | None) -> None:
    backend = ScriptedBackend()
    assert complete(make_app(backend), model=model).json()["model"] == "tiny-base"
    assert backend.cids == [None]


def test_an_adapter_may_have_the_name_that_else_means_the_base(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("default/dummy@1.0.0", 1)
    assert complete(served.app, model="dummy").status_code == 200
    served.backend.give_name("tgi", named("legal"))
    assert complete(served.app, model="tgi").status_code == 200
    assert served.backend.cids == [cid, named("legal").cid]


@pytest.mark.parametrize(
    ("model", "selection"),
    [
        ("tiny-base:legal", ((named("legal").cid, 1.0),)),
        ("tiny-base:0.5*legal", ((named("legal").cid, 0.5),)),
        ("tiny-base:", ()),
    ],
)
def test_an_adapter_may_follow_its_base(model: str, selection: Any) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), model=model)
    assert answer.json()["model"] in (model, "tiny-base")
    assert backend.requests[0].selection == selection


LEGAL, POLITE = (((named(name).cid, 1.0),) for name in ("legal", "team/polite"))


@pytest.mark.parametrize(
    ("fields", "selection"),
    [
        ({"lora_path": "legal"}, LEGAL),
        ({"model": "tiny-base", "lora_path": "legal"}, LEGAL),
        ({"model": "tiny-base:team/polite", "lora_path": "legal"}, POLITE),
        ({"lora_path": None}, ()),
        ({"lora_path": ["legal"]}, LEGAL),
        ({"lora_path": [None]}, ()),
        ({"prompt": ["a", "b"], "lora_path": ["legal", "legal"]}, LEGAL),
    ],
)
def test_lora_path_names_the_adapter_as_with_sglang(fields: Any, selection: Any) -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    answer = complete(app, **fields)
    assert answer.status_code == 200, answer.text
    if "prompt" not in fields:
        assert chat(app, **fields).status_code == 200
    assert len(backend.requests) == 2
    assert {one.selection for one in backend.requests} == {selection}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"lora_path": "nope"}, 404),
        ({"model": "team/polite", "lora_path": "legal"}, 400),
        ({"adapters": ["team/polite"], "lora_path": "legal"}, 400),
        ({"prompt": ["a", "b"], "lora_path": ["legal", None]}, 400),
        ({"prompt": ["a", "b"], "lora_path": ["legal"]}, 400),
    ],
)
def test_lora_path_that_cannot_be_followed_is_refused(fields: Any, status: int) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "lora_path")
    assert not backend.requests


@pytest.mark.parametrize("model", ["other:legal", "tiny-base:nope", "tiny-base:tiny-base:nope"])
def test_an_unknown_adapter_after_a_colon_is_not_the_base(model: str) -> None:
    assert complete(make_app(), model=model).status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "input_text", "text": "hi"}],
        [{"type": "output_text", "text": "hi", "annotations": []}],
        [{"type": "refusal", "refusal": "hi"}],
        ["hi"],
    ],
)
def test_parts_of_other_apis_are_text(content: Any) -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    messages = [{"role": "user", "content": content}]
    assert post(app, "/v1/chat/completions", {"messages": messages}).status_code == 200
    assert chat(app, "hi").status_code == 200
    assert backend.requests[0].prompt_token_ids == backend.requests[1].prompt_token_ids


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    seen: list[Any] = []

    class Codec(type(ScriptedBackend().codec)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
            seen.append(arguments["chat_template_kwargs"])
            return [1]

    backend = ScriptedBackend()
    backend.codec = Codec()
    fields = {"store": True, "mm_processor_kwargs": {}, "chat_template_kwargs": {"x": 1}}
    assert chat(make_app(backend), reasoning_effort="low", **fields).status_code == 200
    assert seen == [{"reasoning_effort": "low", "x": 1}]


@pytest.mark.parametrize("name", ["grammar", "n_predict", "adapter_source", "lora_dir"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/run"])
def test_every_route_refuses_what_it_would_have_to_ignore(path: str, name: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/run": {"artifact": "legal", "input": "x"},
    }
    response = post(make_app(), path, bodies[path] | {name: "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    use = FOREIGN_FIELDS[name].use or "leave it out"
    assert use in response.json()["error"]["message"]


CHAT, TEXT, INPUTS = {"messages": MESSAGES}, {"prompt": "x"}, {"inputs": "x"}
CHECKED: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", CHAT, wire.ChatRequest),
    ("/v1/completions", TEXT, wire.CompletionRequest),
    ("/v1/fim/completions", TEXT, wire.FimRequest),
    ("/infill", {"input_prefix": "x", "input_suffix": "y"}, llamacpp.InfillBody),
    ("/v1/run", {"artifact": "legal", "input": "x"}, wire.RunRequest),
    ("/v1/responses", {"input": "x"}, responses.ResponseBody),
    ("/v1/messages", CHAT | {"max_tokens": 5}, anthropic.MessageBody),
    ("/v1/messages/count_tokens", CHAT, anthropic.CountBody),
    ("/api/chat", CHAT | {"model": ""}, ollama.ChatBody),
    ("/api/generate", TEXT | {"model": ""}, ollama.GenerateBody),
    ("/api/show", {"model": ""}, ollama.ShowBody),
    ("/api/embed", {"model": "", "input": "x"}, ollama_embed.EmbedBody),
    ("/api/embeddings", TEXT | {"model": ""}, ollama_embed.EmbeddingBody),
    ("/completion", TEXT, llamacpp.CompletionBody),
    ("/completions", TEXT, llamacpp.CompletionBody),
    ("/chat/completions", CHAT, wire.ChatRequest),
    ("/generate", {"text": "x"}, sglang.GenerateRequest),
    ("/generate", INPUTS, lorax_wire.GenerateRequest),
    ("/generate_stream", INPUTS, lorax_wire.GenerateRequest),
    ("/", INPUTS, lorax_wire.GenerateRequest),
    ("/embed", INPUTS, lorax_embed.EmbedRequest),
    ("/tokenize", TEXT, wire.TokenizeRequest),
    ("/tokenize", INPUTS, lorax_wire.TokenizeInputs),
    ("/tokenize", {"content": "x"}, llamacpp.TokenizeContent),
    ("/detokenize", {"tokens": [65]}, wire.DetokenizeRequest),
    ("/v1/embeddings", {"input": "x"}, wire_pooling.EmbeddingRequest),
    ("/pooling", {"input": "x"}, wire_pooling.PoolingRequest),
    ("/classify", {"input": "x"}, wire_pooling.ClassifyRequest),
    *(
        (path, {"text_1": "x", "text_2": "x"}, wire_pooling.ScoreRequest)
        for path in ("/score", "/v1/score", "/invocations")
    ),
    *(
        (path, {"query": "x", "documents": ["x"]}, wire_pooling.RerankRequest)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/invocations")
    ),
    ("/invocations", CHAT, wire.ChatRequest),
    ("/invocations", TEXT, wire.CompletionRequest),
    ("/invocations", {"input": "x"}, responses.ResponseBody),
    ("/invocations", INPUTS, lorax_wire.GenerateRequest),
]
VECTORS = (ollama.ShowBody, ollama_embed.EmbedBody, ollama_embed.EmbeddingBody)
VECTORS += (lorax_embed.EmbedRequest, lorax_wire.TokenizeInputs, llamacpp.TokenizeContent)
VECTORS += (wire.TokenizeRequest, wire.DetokenizeRequest, anthropic.CountBody)
MANAGING = re.compile("/v1/adapters.*|.*adapters?(/.*)?|/v1/keys.*|/v1/tenants.*")


def generates(kind: type) -> bool:
    return kind not in VECTORS and not issubclass(kind, wire_pooling.PoolingBody)


@pytest.mark.parametrize(("path", "body", "kind"), CHECKED)
def test_no_route_ignores_a_field_of_the_tables(path: str, body: dict[str, Any], kind: Any) -> None:
    """A field that a body does not have is named in an error, outside and inside its object."""
    # A field by which a path is told apart asks another API, whose rules then apply.
    keys = {"messages", "prompt", "input", "inputs", "text", "content"} - body.keys()
    names = set(unsupported_in(kind, generates=generates(kind)).names) - keys
    cases = [(name, body | {name: "x"}) for name in sorted(names)]
    if path == "/chat/completions":
        cases = [case for case in cases if case[0] != "lora"]
    if hasattr(kind, "inner"):
        key, inner = kind.inner
        own = unsupported_in(inner, generates=generates(kind)).names
        cases += [(name, body | {key: {name: "x"}}) for name in own]
    assert cases
    answers = post_each(make_app(), path, (given for _, given in cases))
    for (name, _), response in zip(cases, answers, strict=True):
        assert response.status_code in (400, 422) or path == "/generate_stream", name
        assert f"{name} is not supported by this route" in response.text, name


def test_every_route_that_computes_is_checked() -> None:
    paths = make_app(allow_runtime_lora_updating=True).document.document["paths"]
    taking = {path for path, ways in paths.items() if "requestBody" in ways.get("post", {})}
    computing = {path for path in taking if not MANAGING.fullmatch(path)}
    assert computing == {path for path, *_ in CHECKED}


def test_a_field_outside_its_object_is_sent_inside() -> None:
    response = post(make_app(), "/", {"inputs": "x", "adapter_id": "legal"})
    assert "put it into parameters" in response.json()["error"]
    response = post(make_app(), "/api/chat", {"model": "", "messages": MESSAGES, "top_k": 5})
    assert "put it into options" in response.json()["error"]


def test_what_to_send_instead_is_a_field_of_the_route() -> None:
    """`max_new_tokens` would be `max_tokens`, which the body of Responses does not have."""
    answer = post(make_app(), "/v1/responses", {"input": "x", "max_new_tokens": 5}).json()
    assert answer["error"]["message"].endswith("leave it out.")
    assert "send max_tokens" in complete(make_app(), max_new_tokens=5).json()["error"]["message"]


def test_tokens_are_not_counted_without_what_would_be_in_the_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    response = post(make_app(), "/tokenize", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", "POST"),
        ("/v1/adapters/a/pin", "DELETE, GET, POST"),
        ("/v1/adapters/a/promote", "DELETE, GET, POST"),
        ("/v1/adapters", "GET, POST"),
        ("/lora-adapters", "GET, HEAD, POST"),
        ("/tokenize", "POST"),
        ("/", "GET, HEAD, POST"),
    ],
)
def test_allow_lists_every_method_of_the_path(path: str, allowed: str) -> None:
    response = request(make_app(), "PUT", path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["code"] == 405


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_health_may_be_asked_for_with_any_method(path: str, method: str) -> None:
    assert request(make_app(), method, path).status_code == 200


def test_token_ids_of_prompt_and_answer() -> None:
    app, said = make_app(), list(b"Hello you")
    whole = chat(app, return_token_ids=True).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (
        list(b"u:hi\na:"),
        said,
    )
    choice = complete(app, return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(b"hi"), said)


def test_token_ids_in_streams_have_the_prompt_once() -> None:
    app = make_app()
    for ask in (chat, complete):
        chunks = events_of(ask(app, return_token_ids=True, stream=True).text)[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [i for one in choices for i in one.get("token_ids", [])] == list(b"Hello you")
        prompts = [one for one in [*chunks, *choices] if "prompt_token_ids" in one]
        assert len(prompts) == 1


def test_prompt_logprobs_by_id() -> None:
    app = make_app()
    of_chat = chat(app, prompt_logprobs=1).json()["prompt_logprobs"]
    assert of_chat[0] is None and len(of_chat) == len("u:hi\na:")
    [first, second] = complete(app, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "65": {"logprob": -65.5, "rank": 1, "decoded_token": "A"},
        str(ord("i")): {"logprob": -0.5, "rank": 1, "decoded_token": "i"},
    }
    assert complete(app, prompt_logprobs=1, stream=True).status_code == 400
    assert complete(app, prompt_logprobs=1, logprobs=2, echo=True).status_code == 400
    assert complete(app, prompt_logprobs=99).json()["error"]["param"] == "prompt_logprobs"


def test_tokens_may_be_written_as_ids() -> None:
    app = make_app()
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    logprobs = complete(app, logprobs=1, **fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:72"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:72", "token_id:65"}
    shown = chat(app, logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]
    assert shown["content"][0]["token"] == "token_id:72"
    assert shown["content"][0]["top_logprobs"][0]["token"] == "token_id:65"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 9}, b"abcdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, b"cdef"),
    ],
)
def test_a_long_prompt_may_be_cut(fields: Any, kept: bytes) -> None:
    backend = ScriptedBackend()
    assert complete(make_app(backend), "abcdef", **fields).status_code == 200
    assert bytes(backend.requests[0].prompt_token_ids) == kept
    bad = complete(make_app(), truncate_prompt_tokens=0).json()["error"]
    assert bad["param"] == "truncate_prompt_tokens"
