"""The openai package against the application: what users' programs do first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from loramux.backend.host import Health
from loramux.errors import EngineBusy, RequestTimeout
from tests.unit.server.asgi_client import make_app, run
from tests.unit.server.scripted_backend import ScriptedBackend, named, says_it_reused
from tests.unit.server.test_errors import failing_backend
from tests.unit.server.test_streaming import dies_after_two

MESSAGES: Any = [{"role": "user", "content": "hi"}]
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def with_client(
    work: Callable[[AsyncOpenAI], Awaitable[Any]],
    backend: ScriptedBackend | None = None,
    *,
    max_retries: int = 0,
) -> Any:
    async def go() -> Any:
        transport = httpx2.ASGITransport(make_app(backend))
        async with AsyncOpenAI(
            base_url="http://test/v1",
            api_key="none",
            max_retries=max_retries,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            return await work(client)

    return run(go())


@pytest.mark.parametrize("messages", [MESSAGES, PARTS])
def test_chat(messages: Any) -> None:
    answer = with_client(
        lambda client: client.chat.completions.create(model="legal", messages=messages)
    )
    assert answer.choices[0].message.content == "Hello you"
    assert answer.model == "legal"
    assert answer.usage.total_tokens == 16


def test_completion_with_everything_that_matters() -> None:
    backend = ScriptedBackend()
    answer = with_client(
        lambda client: client.completions.create(
            model="tiny-base", prompt=["a", "b"], n=2, seed=7, stop=["x", "y"], logprobs=1
        ),
        backend,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs.tokens == list("Hello you")
    assert backend.requests[0].params.seed == 7
    assert backend.requests[0].params.stop == ("x", "y")


def test_adapters_in_the_body() -> None:
    backend = ScriptedBackend()
    extra = {"adapters": ["legal"], "adapter_weights": [0.5]}
    answer = with_client(
        lambda client: client.chat.completions.create(
            model="tiny-base", messages=MESSAGES, extra_body=extra
        ),
        backend,
    )
    assert answer.model == "legal"
    assert backend.requests[0].selection == ((named("legal").cid, 0.5),)


def test_chat_logprobs_and_max_completion_tokens() -> None:
    answer = with_client(
        lambda client: client.chat.completions.create(
            model="tiny-base",
            messages=MESSAGES,
            n=2,
            logprobs=True,
            top_logprobs=1,
            max_completion_tokens=2,
        )
    )
    assert len(answer.choices) == 2
    assert answer.choices[1].finish_reason == "length"
    content = answer.choices[1].logprobs.content
    assert [entry.token for entry in content] == ["H", "e"]
    assert content[0].top_logprobs[0].token == "A"


def test_streamed_chat_with_usage() -> None:
    async def work(client: AsyncOpenAI) -> tuple[str, Any]:
        text, usage = "", None
        stream = await client.chat.completions.create(
            model="legal", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage

    text, usage = with_client(work)
    assert text == "Hello you"
    assert usage.completion_tokens == 9


def test_streamed_completion() -> None:
    async def work(client: AsyncOpenAI) -> str:
        stream = await client.completions.create(model="legal", prompt="hi", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert with_client(work) == "Hello you"


def test_stream_that_breaks_raises() -> None:
    async def work(client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model="legal", messages=MESSAGES, stream=True)
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError, match="died"):
        with_client(work, ScriptedBackend(dies_after_two))


def test_models_can_be_listed_and_got() -> None:
    async def work(client: AsyncOpenAI) -> list[str]:
        names = [model.id async for model in client.models.list()]
        return [(await client.models.retrieve(name)).id for name in names]

    assert with_client(work) == ["tiny-base", "legal", "team/polite"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"model": "legal", "temperature": -1}, openai.BadRequestError),
        ({"model": "legal", "tools": [{}]}, openai.BadRequestError),
    ],
)
def test_refusal_has_the_clients_own_type(fields: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        with_client(lambda client: client.chat.completions.create(messages=MESSAGES, **fields))


def test_busy_and_restarting_have_the_clients_own_types() -> None:
    def ask(client: AsyncOpenAI) -> Awaitable[Any]:
        return client.chat.completions.create(model="legal", messages=MESSAGES)

    with pytest.raises(openai.RateLimitError):
        with_client(ask, failing_backend(EngineBusy("Full.")))
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    with pytest.raises(openai.InternalServerError) as raised:
        with_client(ask, backend)
    assert raised.value.status_code == 503


def test_a_timeout_of_the_request_is_raised_and_not_tried_again() -> None:
    backend = failing_backend(RequestTimeout("Too late."))

    def ask(client: AsyncOpenAI) -> Awaitable[Any]:
        extra = {"timeout": 0.5, "cache_salt": "s"}
        return client.chat.completions.create(model="legal", messages=MESSAGES, extra_body=extra)

    with pytest.raises(openai.APIStatusError, match="Too late.") as raised:
        with_client(ask, backend, max_retries=2)
    assert raised.value.status_code == 408
    assert [(job.timeout_s, job.cache_salt) for job in backend.requests] == [(0.5, "s")]


def test_cached_tokens_stand_where_the_client_reads_them() -> None:
    answer = with_client(
        lambda client: client.chat.completions.create(model="legal", messages=MESSAGES),
        ScriptedBackend(says_it_reused(5)),
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
