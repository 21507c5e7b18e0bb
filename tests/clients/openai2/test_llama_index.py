"""LlamaIndex's OpenAILike, its embeddings and FunctionAgent."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tests.clients.live import ANSWER_OF_SHOUT, BASE, QUESTION, Live
from tests.clients.schemas import City

CLIENT = "llama-index-llms-openai-like"
shows = pytest.mark.shows
ASKED = [ChatMessage(role="user", content=QUESTION)]


def llm_of(live: Live, name: str = "shout", **more: Any) -> OpenAILike:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0} | more
    return OpenAILike(
        model=name,
        api_base=live.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        timeout=120,
        **given,
    )


def weather(city: Literal["Rome", "Paris"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


@shows("text", "stream", "adapters")
def test_chat_and_stream(live: Live) -> None:
    assert llm_of(live).chat(ASKED).message.content == ANSWER_OF_SHOUT
    parts = [part.delta or "" for part in llm_of(live).stream_chat(ASKED)]
    assert "".join(parts) == ANSWER_OF_SHOUT
    prompt = "Once upon a time"
    plain = llm_of(live, BASE, max_tokens=8)
    plain.is_chat_model = False
    assert plain.complete(prompt).text == live.completion(prompt)


@shows("typed")
@pytest.mark.parametrize("by_schema", [True, False])
def test_structured_predict(live: Live, by_schema: bool) -> None:
    """By `json_schema`, or by a tool and `tool_choice: required`."""
    llm = llm_of(live, "pirate", should_use_structured_outputs=by_schema)
    found = llm.structured_predict(City, PromptTemplate("{question}"), question=QUESTION)
    assert isinstance(found, City)


@shows("tools")
def test_tools(live: Live) -> None:
    tool = FunctionTool.from_defaults(weather)
    answer = llm_of(live).chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = llm_of(live).get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Rome", "Paris")


@shows("tools", "loop")
@pytest.mark.parametrize("streaming", [True, False])
def test_function_agent(live: Live, streaming: bool) -> None:
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(weather)],
        llm=llm_of(live),
        initial_tool_choice="weather",
        streaming=streaming,
    )

    async def work() -> tuple[Any, list[Any]]:
        handler = agent.run(QUESTION, max_iterations=6, early_stopping_method="generate")
        results = [x async for x in handler.stream_events() if isinstance(x, ToolCallResult)]
        return await handler, results

    answer, results = asyncio.run(work())
    assert answer.response.content is not None
    assert [str(one.tool_output) for one in results][0] in ("sunny in Rome", "sunny in Paris")


@shows("embeddings", "adapters")
def test_embeddings(live: Live) -> None:
    def embed(name: str) -> list[float]:
        model = OpenAILikeEmbedding(model_name=name, api_base=live.v1, api_key="none")
        return model.get_text_embedding("a cat")

    assert len(embed(BASE)) == 576
    assert embed("shout") != pytest.approx(embed(BASE), abs=1e-2)


@shows("errors")
def test_errors(live: Live) -> None:
    with pytest.raises(openai.NotFoundError):
        llm_of(live, "no-such-model").chat(ASKED)
