"""LangChain's ChatOpenAI and OpenAIEmbeddings, with typed answers and tools."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.live import ANSWER_OF_SHOUT, BASE, QUESTION, Live
from tests.clients.schemas import City, Weather

CLIENT = "langchain-openai"
shows = pytest.mark.shows


def model_of(live: Live, name: str = "shout", **more: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0} | more
    return ChatOpenAI(base_url=live.v1, api_key="none", model=name, **given)


@tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


@shows("text", "stream", "adapters")
def test_invoke_stream_and_batch(live: Live) -> None:
    model = model_of(live)
    answer = model.invoke(QUESTION)
    assert answer.content == ANSWER_OF_SHOUT and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == ANSWER_OF_SHOUT
    assert [one.content for one in model.batch([QUESTION] * 2)] == [ANSWER_OF_SHOUT] * 2


@shows("typed")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(live: Live, method: Any) -> None:
    typed = model_of(live, "pirate").with_structured_output(City, method=method)
    assert isinstance(typed.invoke(QUESTION), City)


@shows("typed")
def test_with_structured_output_in_json_mode(live: Live) -> None:
    typed = model_of(live, "json").with_structured_output(method="json_mode", include_raw=True)
    answer = typed.invoke(f"{QUESTION} Answer in JSON.")
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], dict)


@shows("tools")
@pytest.mark.parametrize("choice", ["weather", "any"])
def test_bind_tools(live: Live, choice: str) -> None:
    bound = model_of(live).bind_tools([Weather, weather], tool_choice=choice)
    answer = bound.invoke(QUESTION)
    assert answer.tool_calls[0]["name"] in ("weather", "Weather") and not answer.invalid_tool_calls
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [
        call["args"] for call in answer.tool_calls
    ]


@shows("embeddings", "adapters")
def test_embeddings(live: Live) -> None:
    def embed(name: str, **more: Any) -> Any:
        client = OpenAIEmbeddings(base_url=live.v1, api_key="none", model=name, **more)
        return client.embed_documents(["a cat", "a kitten"])

    base = embed(BASE, check_embedding_ctx_length=False)
    assert [len(one) for one in base] == [576, 576]
    assert embed("shout", check_embedding_ctx_length=False)[0] != pytest.approx(base[0], abs=1e-2)


@shows("errors")
def test_errors_have_the_clients_own_types(live: Live) -> None:
    with pytest.raises(ContextOverflowError):
        model_of(live).invoke("word " * 9000)
    with pytest.raises(openai.NotFoundError):
        model_of(live, "no-such-model").invoke(QUESTION)


@shows("responses")
def test_the_responses_api(live: Live) -> None:
    model = model_of(live, use_responses_api=True)
    assert model.invoke(QUESTION).text == ANSWER_OF_SHOUT
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER_OF_SHOUT
    bound = model.bind_tools([weather], tool_choice="weather")
    assert bound.invoke(QUESTION).tool_calls[0]["name"] == "weather"
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)
