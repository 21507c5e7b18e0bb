"""OpenAI's Python client on POST /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.live import ANSWER_OF_SHOUT, QUESTION
from tests.clients.openai3.test_openai import client as client
from tests.clients.schemas import WEATHER_TOOL, City, Weather

CLIENT = "openai"
shows = pytest.mark.shows
WEATHER: Any = {"type": "function", **WEATHER_TOOL["function"]}
FORCED: Any = {"type": "function", "name": "weather"}


def respond(client: OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "shout", "input": QUESTION, "temperature": 0}
    return client.responses.create(**given | {"max_output_tokens": 100} | fields)


@shows("responses")
def test_text(client: OpenAI) -> None:
    answer = respond(client)
    assert (answer.output_text, answer.status) == (ANSWER_OF_SHOUT, "completed")
    cut = respond(client, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@shows("responses", "stream")
def test_stream(client: OpenAI) -> None:
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == ANSWER_OF_SHOUT == events[-1].response.output_text
    with client.responses.stream(model="shout", input=QUESTION, temperature=0) as stream:
        assert stream.until_done().get_final_response().output_text == ANSWER_OF_SHOUT


@shows("responses", "typed")
def test_parse(client: OpenAI) -> None:
    answer = client.responses.parse(model="pirate", input=QUESTION, text_format=City)
    assert isinstance(answer.output_parsed, City)
    with client.responses.stream(model="pirate", input=QUESTION, text_format=City) as stream:
        assert isinstance(stream.until_done().get_final_response().output_parsed, City)


@shows("responses", "tools", "loop")
def test_a_loop_of_calls_in_a_stream(client: OpenAI) -> None:
    """The items of each response go back with the results, as coding agents send them."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    asked: dict[str, Any] = {
        "instructions": "You are an agent.",
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
    }
    for _ in range(3):
        events = list(respond(client, input=items, stream=True, tool_choice=FORCED, **asked))
        kinds = [event.type for event in events]
        assert kinds.index("response.output_item.added") < kinds.index(
            "response.function_call_arguments.delta"
        )
        done = next(x for x in events if x.type == "response.function_call_arguments.done")
        call = events[-1].response.output[0]
        assert call.type == "function_call" and call.arguments == done.arguments
        Weather.model_validate(json.loads(call.arguments))
        items += [call.model_dump(exclude_none=True)]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    last = respond(client, input=items, tool_choice="none", **asked)
    assert last.output_text and last.output[0].type == "message"


@shows("responses", "errors")
def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        respond(client, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        respond(client, tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError):
        respond(client, model="no-such-model")
