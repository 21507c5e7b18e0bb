"""LiteLLM: its providers for vLLM and OpenAI, and its router."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.live import ANSWER_OF_SHOUT, BASE, MESSAGES, Live
from tests.clients.schemas import FORCED_WEATHER, WEATHER_TOOL, City, Weather

CLIENT = "litellm"
shows = pytest.mark.shows


def asked(live: Live, model: str = "shout", **more: Any) -> Any:
    given = {"model": f"hosted_vllm/{model}", "api_base": live.v1, "api_key": "none"}
    return given | {"messages": MESSAGES, "temperature": 0, "max_tokens": 100} | more


@shows("text", "adapters")
@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_completion(live: Live, provider: str) -> None:
    fields = asked(live) | {"model": f"{provider}/shout"}
    assert litellm.completion(**fields).choices[0].message.content == ANSWER_OF_SHOUT
    answer = litellm.text_completion(
        model=f"{provider}/pirate",
        prompt="Once upon a time",
        max_tokens=8,
        temperature=0,
        api_base=live.v1,
        api_key="none",
    )
    assert answer.choices[0].text == live.completion("Once upon a time", "pirate")


@shows("stream")
def test_streams(live: Live) -> None:
    async def work() -> str:
        stream = await litellm.acompletion(**asked(live), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(work()) == ANSWER_OF_SHOUT
    stream = litellm.completion(**asked(live), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER_OF_SHOUT


@shows("typed")
def test_response_format(live: Live) -> None:
    answer = litellm.completion(**asked(live, "pirate"), response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


@shows("tools", "loop")
def test_a_tool_loop(live: Live) -> None:
    messages: list[Any] = list(MESSAGES)
    for _ in range(2):
        answer = litellm.completion(
            **asked(live, messages=messages), tools=[WEATHER_TOOL], tool_choice=FORCED_WEATHER
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        Weather.model_validate_json(call.function.arguments)
        messages += [message.model_dump()]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = litellm.completion(**asked(live, messages=messages), tools=[WEATHER_TOOL])
    assert last.choices[0].message.content or last.choices[0].message.tool_calls


@shows("embeddings", "adapters")
def test_embeddings(live: Live) -> None:
    def embed(model: str) -> Any:
        found = litellm.embedding(
            model=f"hosted_vllm/{model}", api_base=live.v1, api_key="none", input=["a cat"]
        )
        return found.data[0]["embedding"]

    assert len(embed(BASE)) == 576
    assert embed("shout") != pytest.approx(embed(BASE), abs=1e-2)


@shows("responses")
def test_responses(live: Live) -> None:
    answer = litellm.responses(
        model="openai/shout",
        api_base=live.v1,
        api_key="none",
        input=MESSAGES[0]["content"],
        temperature=0,
    )
    assert answer.output[0].content[0].text == ANSWER_OF_SHOUT


@shows("errors")
def test_a_prompt_that_is_too_long_falls_back(live: Live) -> None:
    """The router asks another model when the first one answers that its context is exceeded."""
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(live, messages=long, num_retries=0))
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": "hosted_vllm/shout",
                "api_base": live.v1,
                "api_key": "none",
                **more,
            },
        }
        for name, more in (("short", {}), ("long", {"truncate_prompt_tokens": 60}))
    ]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
    answer = router.completion(model="short", messages=long, max_tokens=8)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens == 60


@shows("errors")
def test_errors_have_the_clients_own_types(live: Live) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked(live, "no-such-model", num_retries=0))
