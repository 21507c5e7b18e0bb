"""pydantic-ai's agents."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.live import ANSWER_OF_SHOUT, QUESTION, Live
from tests.clients.schemas import City

CLIENT = "pydantic-ai-slim"
shows = pytest.mark.shows
SETTINGS: Any = {"temperature": 0, "max_tokens": 100}


def agent_of(live: Live, name: str = "shout", kind: Any = OpenAIChatModel, **more: Any) -> Any:
    model = kind(name, provider=OpenAIProvider(base_url=live.v1, api_key="none"))
    return Agent(model, model_settings=SETTINGS, retries=0, **more)


@shows("text", "adapters")
def test_text(live: Live) -> None:
    assert agent_of(live).run_sync(QUESTION).output == ANSWER_OF_SHOUT


@shows("stream")
def test_stream(live: Live) -> None:
    async def work() -> str:
        async with agent_of(live).run_stream(QUESTION) as stream:
            return "".join([piece async for piece in stream.stream_text(delta=True)])

    assert asyncio.run(work()) == ANSWER_OF_SHOUT


@shows("typed")
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_typed_answers(live: Live, form: Any) -> None:
    agent = agent_of(live, "pirate", output_type=form(City))
    assert isinstance(agent.run_sync(QUESTION).output, City)


class Answer(BaseModel):
    """What the adapter `json` was trained to answer with."""

    answer: str
    topic: str


@shows("typed")
def test_typed_answers_by_prompt(live: Live) -> None:
    agent = agent_of(live, "json", output_type=PromptedOutput(Answer))
    assert isinstance(agent.run_sync(QUESTION).output, Answer)


@shows("tools", "loop")
@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_a_tool_loop(live: Live, kind: Any) -> None:
    agent = agent_of(live, kind=kind, output_type=ToolOutput(City))

    @agent.tool_plain
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    found = agent.run_sync(QUESTION)
    parts = [part for message in found.all_messages() for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    results = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert len(calls) == len(results) and calls[-1].tool_name == "final_result"
    assert isinstance(found.output, City)


@shows("responses")
def test_the_responses_api(live: Live) -> None:
    agent = agent_of(live, kind=OpenAIResponsesModel)
    assert agent.run_sync(QUESTION).output == ANSWER_OF_SHOUT
    typed = agent_of(live, kind=OpenAIResponsesModel, output_type=NativeOutput(City))
    assert isinstance(typed.run_sync(QUESTION).output, City)


@shows("errors")
def test_errors_have_the_clients_own_type(live: Live) -> None:
    with pytest.raises(ModelHTTPError) as raised:
        agent_of(live, "no-such-model").run_sync(QUESTION)
    assert raised.value.status_code == 404
