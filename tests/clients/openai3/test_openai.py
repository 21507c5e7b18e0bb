"""OpenAI's Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.live import ADAPTERS, ANSWER_OF_SHOUT, BASE, MESSAGES, QUESTION, Live
from tests.clients.schemas import FORCED_WEATHER, City, Weather

CLIENT = "openai"
shows = pytest.mark.shows
WEATHER = openai.pydantic_function_tool(Weather, name="weather")
FORCED: Any = FORCED_WEATHER


@pytest.fixture
def client(live: Live) -> Any:
    with OpenAI(base_url=live.v1, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "shout", "messages": MESSAGES, "temperature": 0}
    return client.chat.completions.create(**given | {"max_tokens": 24} | fields)


@shows("text", "adapters")
def test_chat_by_name_of_an_adapter(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    for messages in (MESSAGES, parts):
        answer = chat(client, messages=messages)
        assert answer.choices[0].message.content == ANSWER_OF_SHOUT
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
    assert chat(client, model=BASE).choices[0].message.content != ANSWER_OF_SHOUT


@shows("text", "adapters")
def test_completions(client: OpenAI, live: Live) -> None:
    answers = {}
    for model in (BASE, *ADAPTERS[:2]):
        answer = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2
        )
        answers[model] = answer.choices[0].text
        assert answers[model] == live.completion("Once upon a time", model)
        assert len(answer.choices[0].logprobs.tokens) == len(
            answer.choices[0].logprobs.top_logprobs
        )
    assert len(set(answers.values())) == 3


@shows("text")
def test_choices_seeds_stops_and_logprobs(client: OpenAI) -> None:
    answer = chat(client, n=2, temperature=1.5, seed=7, logprobs=True, top_logprobs=2)
    again = chat(client, n=2, temperature=1.5, seed=7)
    texts = [[one.message.content for one in found.choices] for found in (answer, again)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    assert all(len(one.top_logprobs) == 2 for one in answer.choices[0].logprobs.content)
    stopped = chat(client, stop=["Rome"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (
        ANSWER_OF_SHOUT.split("Rome")[0],
        "stop",
    )
    cut = chat(client, max_tokens=None, max_completion_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


@shows("stream")
def test_streams(client: OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.delta.content or "" for x in chunks for c in x.choices) == ANSWER_OF_SHOUT
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(
        model="shout", messages=MESSAGES, temperature=0, max_tokens=24
    ) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.content == (
            ANSWER_OF_SHOUT
        )


@shows("typed")
def test_parse(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "pirate", "messages": MESSAGES, "response_format": City}
    answer = client.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(streamed, City)
    whole = chat(client, response_format={"type": "json_object"}, max_tokens=200)
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)


@shows("tools")
def test_tools_are_parsed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "shout", "messages": MESSAGES, "tools": [WEATHER]}
    for choice in (FORCED, "required"):
        answer = client.chat.completions.parse(**asked, tool_choice=choice)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asked, tool_choice=FORCED) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    kinds = {event.type for event in events}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert isinstance(final.function.parsed_arguments, Weather)


@shows("tools", "loop")
def test_a_tool_loop(client: OpenAI) -> None:
    messages: list[Any] = list(MESSAGES)
    for _ in range(3):
        answer = chat(
            client, messages=messages, tools=[WEATHER], tool_choice=FORCED, max_tokens=100
        )
        message = answer.choices[0].message
        call = message.tool_calls[0]
        Weather.model_validate_json(call.function.arguments)
        messages += [message.model_dump(exclude_none=False)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = chat(client, messages=messages, tools=[WEATHER], tool_choice="none")
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


@shows("embeddings", "adapters")
def test_embeddings(client: OpenAI) -> None:
    texts = ["a cat", "a kitten", "the stock market"]
    found = client.embeddings.create(model=BASE, input=texts)
    plain = client.embeddings.create(model=BASE, input=texts, encoding_format="float")
    assert len(found.data) == 3 and len(found.data[0].embedding) == 576
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-3)
    adapted = client.embeddings.create(model="shout", input=texts)
    assert adapted.data[0].embedding != pytest.approx(found.data[0].embedding, abs=1e-2)


@shows("adapters")
def test_models(client: OpenAI) -> None:
    models = {one.id: one.model_dump() for one in client.models.list()}
    assert {BASE, *ADAPTERS} <= set(models)
    assert all(models[name]["parent"] == BASE for name in ADAPTERS)
    assert client.models.retrieve("shout").id == "shout"
    both = chat(client, model=BASE, extra_body={"adapters": ["shout"], "adapter_weights": [1.0]})
    assert both.choices[0].message.content == ANSWER_OF_SHOUT


@shows("errors")
def test_errors_have_the_clients_own_types(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        chat(client, model="no-such-model")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, messages=[{"role": "user", "content": "word " * 9000}])
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="not") as raised:
        chat(client, response_format=schema)
    assert raised.value.param == "response_format"
