"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.live import ANSWER_OF_SHOUT, MESSAGES, Live
from tests.clients.schemas import WEATHER_SCHEMA, City, Weather

CLIENT = "anthropic"
shows = pytest.mark.shows
TOOLS: Any = [{"name": "weather", "input_schema": WEATHER_SCHEMA}]


@pytest.fixture
def client(live: Live) -> Any:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def asked(**more: Any) -> Any:
    given = {"model": "shout", "max_tokens": 100, "messages": MESSAGES}
    return given | {"extra_body": {"temperature": 0}} | more


@shows("text", "adapters")
def test_a_message(client: Any) -> None:
    answer = client.messages.create(**asked())
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER_OF_SHOUT, "end_turn")
    assert answer.usage.output_tokens > 0
    assert client.messages.create(**asked(system="Be brief.", max_tokens=2)).stop_reason == (
        "max_tokens"
    )


@shows("stream")
def test_a_stream(client: Any) -> None:
    with client.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == ANSWER_OF_SHOUT
        assert stream.get_final_message().stop_reason == "end_turn"


@shows("typed")
def test_parse(client: Any) -> None:
    answer = client.messages.parse(**asked(model="pirate"), output_format=City)
    assert isinstance(answer.parsed_output, City)


@shows("tools", "loop")
def test_a_tool_loop(client: Any) -> None:
    messages = list(MESSAGES)
    choice = {"type": "tool", "name": "weather"}
    for _ in range(2):
        fields = asked(messages=messages, tools=TOOLS, tool_choice=choice)
        with client.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        assert call == client.messages.create(**fields).content[-1].model_copy(
            update={"id": call.id}
        )
        Weather.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages += [{"role": "assistant", "content": answer.content}]
        messages += [{"role": "user", "content": [result]}]
    last = client.messages.create(
        **asked(messages=messages, tools=TOOLS, tool_choice={"type": "none"})
    )
    assert last.content[0].text


@shows("text")
def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model="shout", messages=MESSAGES)
    usage = client.messages.create(**asked()).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@shows("errors")
def test_errors_have_the_clients_own_types(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model="no-such-model"))
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked(messages=long))
