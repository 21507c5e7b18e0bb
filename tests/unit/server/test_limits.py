"""Limits of tenants and keys on every route that generates, on a real registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from loramux.backend.host import EngineStats
from loramux.backend.text import Delta
from loramux.errors import EngineStopped
from loramux.registry.tenants import SettingChanges
from loramux.types.pooling import ModelPooling, Pooling
from loramux.types.request import Request
from loramux.types.routes import INFER, ROUTE_ACCESS
from tests.unit.server.asgi_client import CHAT, request, run
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import delta, say_hello
from tests.unit.server.scripted_images import PICTURE

MESSAGES = [{"role": "user", "content": "hi"}]
OF_TEXT = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "tiny-base"},
    "/v1/responses": {"input": "hi"},
    "/": {"inputs": "hi"},
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/invocations": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/completions": {"prompt": "hi"},
    "/chat/completions": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "model": "tiny-base"},
    "/api/generate": {"prompt": "hi", "model": "tiny-base"},
    "/v1/run": {"artifact": "default/sql@1.0.0", "input": "hi"},
}
OF_VECTORS = {
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/embed": {"inputs": "hi"},
    "/api/embed": {"input": "hi", "model": "tiny-base"},
    "/api/embeddings": {"prompt": "hi", "model": "tiny-base"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
}
OF_CLASSES = {"/classify": {"input": "hi"}}
# Cost no step of the engine.
OF_IMAGES = {
    "/v1/images/generations": {"prompt": "a fox"},
    "/tiny-flux/predict": {
        "model_type": "diffusion",
        "model_name": "tiny-flux",
        "prompt": "a fox",
        "width": 64,
        "height": 64,
    },
}
OF_IMAGES["/v1/images/edits"] = {"prompt": "a fox", "image": PICTURE}
OF_IMAGES["/sdapi/v1/txt2img"] = {"prompt": "a fox", "width": 64, "height": 64}
OF_IMAGES["/sdapi/v1/img2img"] = OF_IMAGES["/sdapi/v1/txt2img"] | {"init_images": [PICTURE]}
OF_IMAGES["/tiny-flux/stream"] = OF_IMAGES["/tiny-flux/predict"]
# Completions of models whose tokenizer has FIM tokens; see test_fim.
OF_FIM = {"/infill", "/v1/fim/completions"}
OF_TOKENS = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}


def limited(make: Make, **limits: int) -> RegistryApp:
    found = make(served_model_names=("tiny-base",), has_images=True)
    found.push("default/sql@1.0.0", 1)
    found.registry.tenants.set("default", SettingChanges(limits=limits))
    found.adapters.follow_access()
    return found


def pooled(found: RegistryApp, kind: Pooling) -> None:
    pooling = ModelPooling(pooling=kind, labels=("a", "b"))
    found.backend.card = replace(found.backend.card, pooling=pooling)


def ask(found: RegistryApp, path: str, body: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(found.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    answer: httpx2.Response = run(send())
    return answer


def use_up(found: RegistryApp) -> None:
    """Spends the only request of a minute."""
    answer = ask(found, CHAT, {"messages": MESSAGES})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-limit-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"


def test_every_route_that_generates_is_in_these_tables() -> None:
    posts = {
        key.removeprefix("POST ") for key, one in ROUTE_ACCESS.items() if one.scopes == INFER.scopes
    }
    posts = {path for path in posts if not path.startswith("GET ")}
    images = {path.replace("/tiny-flux/", "/{name}/") for path in OF_IMAGES}
    assert posts == {*OF_TEXT, *OF_FIM, *OF_VECTORS, *OF_CLASSES, *OF_TOKENS, *images}


def check_refused(answer: httpx2.Response, limit: str) -> None:
    assert answer.status_code == 429, answer.text
    assert limit in answer.text and "The tenant default may use 1 " in answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("path", OF_TEXT)
def test_text_over_the_limit_is_refused_in_the_shape_of_its_api(
    registry_app: Make, path: str
) -> None:
    found = limited(registry_app, requests_per_minute=1)
    use_up(found)
    answer = ask(found, path, OF_TEXT[path])
    if path == "/generate_stream":
        # TGI's clients expect errors as events of a stream that has begun.
        assert answer.text.startswith('data: {"error":"The tenant default may use 1 ')
        return
    check_refused(answer, "requests per minute")
    assert answer.json().keys() & {"error", "detail", "message"}


@pytest.mark.parametrize("path", [*OF_VECTORS, *OF_CLASSES])
def test_vectors_and_scores_over_the_limit_are_refused(registry_app: Make, path: str) -> None:
    found = limited(registry_app, requests_per_minute=1)
    use_up(found)
    pooled(found, Pooling.HEAD if path in OF_CLASSES else Pooling.LAST)
    check_refused(ask(found, path, {**OF_VECTORS, **OF_CLASSES}[path]), "requests per minute")


@pytest.mark.parametrize("path", OF_IMAGES)
def test_images_over_the_limit_are_refused_in_the_shape_of_their_api(
    registry_app: Make, path: str
) -> None:
    found = limited(registry_app, requests_per_minute=1)
    use_up(found)
    answer = ask(found, path, OF_IMAGES[path])
    check_refused(answer, "requests per minute")
    keys = {"detail"} if "tiny-flux" in path else {"error"}
    keys |= {"detail", "body", "errors"} if "sdapi" in path else set()
    assert answer.json().keys() == keys


def test_image_tokens_times_steps_count_as_tokens(registry_app: Make) -> None:
    found = limited(registry_app, tokens_per_minute=1000)
    answer = ask(found, "/v1/images/generations", {"prompt": "a fox", "size": "64x64", "steps": 4})
    usage = answer.json()["usage"]
    assert usage["output_tokens"] == 4 * 4 * 4
    again = ask(found, "/v1/images/generations", {"prompt": "a fox"})
    left = int(again.headers["x-ratelimit-remaining-tokens"])
    assert 0 < left <= 1000 - usage["total_tokens"]
    # The steps of this image are more than the limit allows at all.
    body = {"prompt": "a fox", "size": "256x256", "steps": 100}
    refused = ask(found, "/v1/images/generations", body)
    assert refused.status_code == 429 and "tokens per minute" in refused.text


def test_streams_are_refused_before_they_begin_and_give_their_place_back(
    registry_app: Make,
) -> None:
    found = limited(registry_app, concurrent_requests=1)
    body = {"messages": MESSAGES, "stream": True}
    for _ in range(3):
        answer = ask(found, CHAT, body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")

    async def several() -> list[int]:
        transport = httpx2.ASGITransport(found.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(5)))
        return sorted(answer.status_code for answer in answers)

    statuses = run(several())
    assert statuses[0] == 200 and set(statuses) <= {200, 429}
    assert ask(found, CHAT, body).status_code == 200


def test_prompt_and_answer_count_as_tokens(registry_app: Make) -> None:
    found = limited(registry_app, tokens_per_minute=1000)
    answer = ask(found, "/v1/completions", {"prompt": "hi"})
    usage = answer.json()["usage"]["total_tokens"]
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    left = ask(found, "/v1/completions", {"prompt": "hi"}).headers["x-ratelimit-remaining-tokens"]
    assert 0 < int(left) <= 1000 - usage


@pytest.mark.parametrize("stream", [False, True])
def test_requests_at_once_use_no_more_tokens_than_the_limit(
    registry_app: Make, stream: bool
) -> None:
    found = limited(registry_app, tokens_per_minute=200)
    body = {"prompt": "hi", "max_tokens": 20, "n": 2, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}

    async def several() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(found.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            posts = (client.post("/v1/completions", json=body) for _ in range(30))
            return list(await asyncio.gather(*posts))

    answers = run(several())
    statuses = [answer.status_code for answer in answers]
    # 2 + 2 * 20 tokens each are reserved.
    assert statuses.count(200) == 4 and set(statuses) == {200, 429}
    assert all("retry-after" in one.headers for one in answers if one.status_code == 429)
    # What was not used is given back.
    used = sum(map(total_tokens, answers))
    left = found.adapters.quotas.open("default", None)
    assert left is not None
    assert int(left.headers()["x-ratelimit-remaining-tokens"]) >= 200 - used


async def stop(request: Request) -> AsyncIterator[Delta]:
    """Yield an engine that is restarted after the first token."""
    yield delta(request, 0, b"H")
    raise EngineStopped("The engine was restarted.")


def total_tokens(answer: httpx2.Response) -> int:
    if answer.status_code != 200:
        return 0
    if "event-stream" not in answer.headers["content-type"]:
        return int(answer.json()["usage"]["total_tokens"])
    last = [line for line in answer.text.splitlines() if '"usage":{' in line][-1]
    return int(json.loads(last.removeprefix("data: "))["usage"]["total_tokens"])


def test_an_answer_that_no_minute_allows_is_refused_with_the_max_tokens_that_fit(
    registry_app: Make,
) -> None:
    found = limited(registry_app, tokens_per_minute=50)
    for body in ({"max_tokens": 60}, {"max_tokens": 30, "n": 2}):
        answer = ask(found, "/v1/completions", {"prompt": "hi", **body})
        assert answer.status_code == 429 and "retry-after" not in answer.headers
        said = answer.json()["error"]["message"]
        assert "60 of max_tokens times n, which fits up to 48" in said, said
    answer = ask(found, "/v1/completions", {"prompt": "hi", "max_tokens": 24, "n": 2})
    assert answer.status_code == 200


@pytest.mark.parametrize("failing", ["error", "leaves"])
def test_what_a_request_without_an_end_reserved_is_given_back(
    registry_app: Make, failing: str
) -> None:
    found = limited(registry_app, tokens_per_minute=60)
    body = {"prompt": "hi", "max_tokens": 55}

    async def leave() -> None:
        transport = httpx2.ASGITransport(found.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while not found.backend.requests:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    if failing == "error":
        found.backend.script = stop
        assert ask(found, "/v1/completions", body).status_code == 503
        found.backend.script = say_hello
    else:
        run(leave())
    # Only the prompt and the tokens that were generated stay used.
    assert ask(found, "/v1/completions", {**body, "max_tokens": 45}).status_code == 200


def test_a_request_over_a_limit_that_never_allows_it_is_not_retried(registry_app: Make) -> None:
    answer = ask(limited(registry_app, requests_per_minute=0), CHAT, {"messages": MESSAGES})
    assert answer.status_code == 429 and "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["reason"] == "requests_per_minute"


def test_limits_that_change_apply_to_the_next_request(registry_app: Make) -> None:
    found = limited(registry_app, requests_per_minute=1)
    use_up(found)
    found.registry.tenants.set("default", SettingChanges(limits={"requests_per_minute": None}))
    found.adapters.follow_access()
    answer = ask(found, CHAT, {"messages": MESSAGES})
    assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


def test_pins_are_limited_by_their_pages_for_tenant_and_key(registry_app: Make) -> None:
    found = limited(registry_app, pinned_pages=3)
    # Of 64 bytes each, in pages of 32.
    found.backend.stats = EngineStats(num_pages=found.backend.card.pool_bytes // 32)
    for number, name in enumerate(("tax", "law"), start=2):
        found.push(f"default/{name}@1.0.0", number)
    key = found.key("default")
    key_id = key["authorization"].split("_")[1]

    def pin(name: str, method: str = "POST", header: Any = key) -> httpx2.Response:
        return request(found.app, method, f"/v1/adapters/{name}/pin", headers=header)

    # Also of adapters that the engine has not seen yet.
    assert [pin(name).status_code for name in ("sql", "law", "sql")] == [200, 403, 200]
    refused = pin("law").json()["error"]
    assert refused["reason"] == "pinned_pages" and "1 are left; this adapter needs 2" in str(
        refused
    )
    assert not [use for use in found.backend.uses if use.is_pinned and "law" in use.cid]
    assert pin("sql", "DELETE").status_code == pin("law").status_code == 200
    found.registry.tenants.set("default", SettingChanges(limits={"pinned_pages": None}))
    found.registry.tenants.set_key_limits(key_id, {"pinned_pages": 1})
    found.adapters.follow_access()
    assert pin("tax").status_code == 403
    assert pin("tax", header=found.key("default")).status_code == 200


def test_the_share_of_the_tenants_record_reaches_the_scheduler(registry_app: Make) -> None:
    found = limited(registry_app)
    found.registry.tenants.set("default", SettingChanges(share=2.5))
    found.adapters.follow_access()
    ask(found, CHAT, {"messages": MESSAGES})
    assert found.backend.requests[-1].tenant_share == 2.5


def test_a_restarted_server_remembers_the_last_minute(registry_app: Make) -> None:
    found = limited(registry_app, requests_per_minute=1)
    use_up(found)
    again = registry_app(served_model_names=("tiny-base",))
    again.adapters.follow_access()
    again.adapters.recall_use("pool")
    check_refused(ask(again, CHAT, {"messages": MESSAGES}), "requests per minute")
