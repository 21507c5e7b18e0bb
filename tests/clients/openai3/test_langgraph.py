"""LangGraph's graphs and LangChain's agents, which are such graphs."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tests.clients.live import QUESTION, Live
from tests.clients.openai3.test_langchain import model_of, weather
from tests.clients.schemas import City

CLIENT = "langgraph"
shows = pytest.mark.shows


@shows("tools", "loop")
def test_a_graph_that_loops_over_tools(live: Live) -> None:
    forced = model_of(live).bind_tools([weather], tool_choice="weather")
    free = model_of(live).bind_tools([weather], tool_choice="none")

    def agent(state: MessagesState) -> Any:
        num_results = sum(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [(forced if num_results < 2 else free).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    messages = graph.compile().invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    kinds = [type(message) for message in messages]
    assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[2].content in ("sunny in Rome", "sunny in Paris") and messages[-1].content


@shows("tools", "loop", "typed")
def test_an_agent_that_answers_with_a_type(live: Live) -> None:
    """The agent itself decides whether it calls the tool; its answer has the type at any rate."""
    agent = create_agent(model_of(live), tools=[weather], response_format=City)
    found = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 8})
    assert isinstance(found["structured_response"], City)
