"""DSPy's LM with its adapters, and a ReAct loop."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import pytest
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition

from tests.clients.live import ANSWER_OF_SHOUT, BASE, MESSAGES, QUESTION, Live
from tests.clients.schemas import City

CLIENT = "dspy"
shows = pytest.mark.shows


class Question(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    answer: Literal["Rome", "Paris"] = dspy.OutputField()


class Describe(dspy.Signature):
    """Describe the city of the question."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()


@pytest.fixture(scope="module", autouse=True)
def declared() -> None:
    """DSPy sends schemas only to providers that are declared to know them."""
    access = AccessPolicy(provider="loramux", env_keys=(), base_url="http://127.0.0.1:8000/v1")
    dspy.lm15.register_provider(
        ProviderDefinition.chat(access, compat=OpenAIChatCompat()),
        supports=ModelSupport(function_calling=True, response_schema=True),
    )


def lm_of(live: Live, name: str = "shout", **more: Any) -> Any:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "cache": False} | more
    return dspy.LM(f"loramux/{name}", api_base=live.v1, api_key="none", num_retries=0, **given)


@shows("text", "adapters")
def test_the_model_alone(live: Live) -> None:
    assert lm_of(live)(messages=MESSAGES) == [ANSWER_OF_SHOUT]
    assert lm_of(live, BASE)(QUESTION) != [ANSWER_OF_SHOUT]


@shows("typed")
@pytest.mark.parametrize("signature", [Question, Describe])
def test_predict_with_a_schema(live: Live, signature: Any) -> None:
    """JSONAdapter sends the signature's outputs as a JSON schema."""
    with dspy.context(lm=lm_of(live, "pirate"), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(signature)(question=QUESTION)
    if signature is Question:
        assert found.answer in ("Rome", "Paris")
    else:
        assert isinstance(found.city, City)


class Ask(dspy.Signature):
    """Call the tool that helps with the question."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


@shows("tools")
def test_native_tool_calls(live: Live) -> None:
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    lm = lm_of(live, tool_choice="required")
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        found = dspy.Predict(Ask)(question=QUESTION, tools=[dspy.Tool(weather)])
    call = found.calls.tool_calls[0]
    assert weather(**call.args) in ("sunny in Rome", "sunny in Paris")


@shows("errors")
def test_errors(live: Live) -> None:
    """Through LiteLLM; DSPy's own engine looks for another form of the error."""
    lm = dspy.LM(
        "hosted_vllm/shout", api_base=live.v1, api_key="none", num_retries=0, engine="litellm"
    )
    with pytest.raises(dspy.ContextWindowExceededError):
        lm("word " * 9000)
