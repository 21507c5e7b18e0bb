"""TGI's Python client, text-generation."""

from __future__ import annotations

from typing import Any

import pytest
import text_generation
from text_generation import errors
from text_generation.types import Grammar, GrammarType

from tests.clients.live import BASE, MESSAGES, Live
from tests.clients.schemas import WEATHER_TOOL, City, Weather

CLIENT = "text-generation"
shows = pytest.mark.shows
PROMPT = "Once upon a time"


@pytest.fixture
def client(live: Live) -> text_generation.Client:
    return text_generation.Client(live.url, timeout=120)


@shows("text")
def test_generate(client: text_generation.Client, live: Live) -> None:
    answer = client.generate(PROMPT, max_new_tokens=8, decoder_input_details=True, top_n_tokens=1)
    assert answer.generated_text == live.completion(PROMPT)
    assert answer.details.generated_tokens == 8
    assert "".join(one.text for one in answer.details.prefill) == PROMPT


@shows("text")
def test_best_of(client: text_generation.Client) -> None:
    answer = client.generate(PROMPT, best_of=2, do_sample=True, max_new_tokens=8)
    assert len(answer.details.best_of_sequences) == 1


@shows("stream")
def test_stream(client: text_generation.Client, live: Live) -> None:
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert "".join(one.token.text for one in events) == live.completion(PROMPT)
    assert events[-1].details.finish_reason == "length"


@shows("typed")
def test_a_grammar(client: text_generation.Client) -> None:
    grammar = Grammar(type=GrammarType.Json, value=City.model_json_schema())
    answer = client.generate(PROMPT, grammar=grammar, max_new_tokens=60)
    City.model_validate_json(answer.generated_text)
    digits = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    assert client.generate(PROMPT, grammar=digits).generated_text.isdecimal()


@shows("text")
def test_chat_without_a_model(client: text_generation.Client, live: Live) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.0}
    answer = client.chat(**asked)
    own = live.post("/v1/chat/completions", model=BASE, **asked)
    assert answer.choices[0].message.content == own["choices"][0]["message"]["content"]


@shows("tools")
def test_tools(client: text_generation.Client) -> None:
    answer = client.chat(
        messages=MESSAGES, max_tokens=100, tools=[WEATHER_TOOL], tool_choice="weather"
    )
    (call,) = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call["function"]["arguments"])


@shows("errors")
def test_errors_have_the_clients_own_types(client: text_generation.Client) -> None:
    with pytest.raises(errors.ValidationError):
        client.generate("word " * 9000)
    with pytest.raises(errors.ValidationError):
        list(client.generate_stream("word " * 9000))
