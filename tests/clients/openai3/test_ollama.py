"""Ollama's Python client."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.clients.live import ADAPTERS, ANSWER_OF_SHOUT, BASE, MESSAGES, Live
from tests.clients.schemas import WEATHER_TOOL, City, Weather

CLIENT = "ollama"
shows = pytest.mark.shows
GREEDY: Any = {"temperature": 0, "num_predict": 100}


@pytest.fixture
def client(live: Live) -> ollama.Client:
    return ollama.Client(live.url)


@shows("text", "adapters")
def test_chat_and_generate(client: ollama.Client, live: Live) -> None:
    answer = client.chat("shout:latest", MESSAGES, options=GREEDY)
    assert (answer.message.content, answer.done_reason) == (ANSWER_OF_SHOUT, "stop")
    assert answer.eval_count and answer.total_duration
    raw = client.generate(
        "pirate", "Once upon a time", raw=True, options={"temperature": 0, "num_predict": 8}
    )
    assert (raw.response, raw.done_reason) == (
        live.completion("Once upon a time", "pirate"),
        "length",
    )


@shows("stream")
def test_streams(client: ollama.Client) -> None:
    parts = list(client.chat("shout", MESSAGES, stream=True, options=GREEDY))
    assert "".join(part.message.content or "" for part in parts) == ANSWER_OF_SHOUT
    assert parts[-1].done
    prompt = MESSAGES[0]["content"]
    words = list(client.generate("shout", prompt, stream=True, options=GREEDY))
    assert "".join(part.response for part in words) == ANSWER_OF_SHOUT


@shows("typed")
def test_a_format(client: ollama.Client) -> None:
    schema = City.model_json_schema()
    answer = client.chat("pirate", MESSAGES, format=schema, options=GREEDY)
    City.model_validate_json(answer.message.content or "")


@shows("tools", "loop")
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(client: ollama.Client, stream: bool) -> None:
    """Ollama's API has no tool_choice: the model itself chooses to call."""
    messages: list[Any] = [{"role": "user", "content": "Use the tool weather for Rome."}]

    def ask(tools: Any) -> tuple[str, list[Any]]:
        found = client.chat("shout", messages, tools=tools, stream=stream, options=GREEDY)
        parts = list(found) if stream else [found]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        return "".join(part.message.content or "" for part in parts), calls

    text, calls = ask([WEATHER_TOOL])
    assert not text and len(calls) == 1
    Weather.model_validate(calls[0].function.arguments)
    messages += [{"role": "assistant", "content": text, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_name": "weather", "content": "sunny"}]
    text, calls = ask(None)
    assert text and not calls


@shows("adapters")
def test_models(client: ollama.Client) -> None:
    assert {BASE, *ADAPTERS} <= {one.model for one in client.list().models}
    assert "completion" in (client.show("shout").capabilities or ())
    assert BASE in [one.model for one in client.ps().models]


@shows("errors")
def test_errors_have_the_clients_own_type(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as raised:
        client.chat("no-such-model", MESSAGES)
    assert raised.value.status_code == 404
