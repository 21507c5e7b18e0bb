"""huggingface_hub's InferenceClient."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests.clients.live import ANSWER_OF_SHOUT, BASE, MESSAGES, Live
from tests.clients.schemas import FORCED_WEATHER, WEATHER_TOOL, City, Weather

CLIENT = "huggingface_hub"
shows = pytest.mark.shows
PROMPT = "Once upon a time"


@pytest.fixture
def client(live: Live) -> InferenceClient:
    return InferenceClient(live.url, timeout=120)


@shows("text", "adapters")
def test_text_generation(client: InferenceClient, live: Live) -> None:
    text = live.completion(PROMPT, "pirate")
    asked: dict[str, Any] = {"adapter_id": "pirate", "max_new_tokens": 8}
    assert client.text_generation(PROMPT, **asked) == text
    whole = client.text_generation(PROMPT, **asked, details=True, return_full_text=True)
    assert whole.generated_text == PROMPT + text
    assert whole.details.finish_reason == "length"
    assert client.text_generation(PROMPT, max_new_tokens=8) == live.completion(PROMPT) != text


@shows("stream")
def test_streams(client: InferenceClient, live: Live) -> None:
    asked: dict[str, Any] = {"adapter_id": "pirate", "max_new_tokens": 8, "stream": True}
    assert "".join(client.text_generation(PROMPT, **asked)) == live.completion(PROMPT, "pirate")
    events = list(client.text_generation(PROMPT, **asked, details=True))
    assert events[-1].details.generated_tokens == 8


@shows("typed")
def test_grammars(client: InferenceClient) -> None:
    schema = City.model_json_schema()
    grammar: Any = {"type": "json", "value": schema}
    City.model_validate_json(client.text_generation(PROMPT, grammar=grammar, max_new_tokens=60))
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = client.chat_completion(MESSAGES, response_format=form, max_tokens=60)
    City.model_validate_json(answer.choices[0].message.content)


@shows("text", "stream", "adapters")
def test_chat(live: Live, client: InferenceClient) -> None:
    named = InferenceClient(base_url=live.v1, api_key="none", timeout=120)
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
    answer = named.chat_completion(MESSAGES, model="shout", **asked)
    assert answer.choices[0].message.content == ANSWER_OF_SHOUT
    chunks = list(named.chat_completion(MESSAGES, model="shout", stream=True, **asked))
    assert "".join(x.choices[0].delta.content or "" for x in chunks if x.choices) == (
        ANSWER_OF_SHOUT
    )
    own = live.post("/v1/chat/completions", model=BASE, messages=MESSAGES, **asked)
    unnamed = client.chat_completion(MESSAGES, **asked)
    assert unnamed.choices[0].message.content == own["choices"][0]["message"]["content"]


@shows("tools")
def test_tools(client: InferenceClient) -> None:
    answer = client.chat_completion(
        MESSAGES, tools=[WEATHER_TOOL], tool_choice=FORCED_WEATHER, max_tokens=100
    )
    (call,) = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


@shows("text")
def test_the_asynchronous_client(live: Live) -> None:
    async def work() -> str:
        async with AsyncInferenceClient(live.url, timeout=120) as client:
            return await client.text_generation(PROMPT, max_new_tokens=8)

    assert asyncio.run(work()) == live.completion(PROMPT)


@shows("errors")
def test_errors_have_the_clients_own_types(client: InferenceClient) -> None:
    with pytest.raises(ValidationError):
        client.text_generation("word " * 9000)
    with pytest.raises(HfHubHTTPError) as raised:
        client.chat_completion([{"role": "user", "content": "word " * 9000}])
    assert raised.value.response.status_code == 400
