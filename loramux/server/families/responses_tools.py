"""Tools of a response: functions, alone or in namespaces, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loramux.errors import InvalidRequest


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for _, tool in _functions(tools, None)
    ]


def namespace_of_each(tools: Sequence[Any]) -> dict[str, str]:
    """Return function -> its namespace, which stands in calls of it."""
    found = ((namespace, tool.get("name")) for namespace, tool in _functions(tools, None))
    return {
        name: namespace
        for namespace, name in found
        if namespace is not None and isinstance(name, str)
    }


def _functions(
    tools: Sequence[Any], namespace: str | None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            yield from _functions(_grouped(tool), tool["name"])
        elif kind != "function":
            raise InvalidRequest(
                f"A tool of type {kind!r} is not supported: send functions, alone or in a "
                "namespace.",
                param="tools",
            )
        else:
            yield namespace, tool


def _grouped(tool: dict[str, Any]) -> list[Any]:
    tools = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tools, list):
        raise InvalidRequest("A namespace needs a name and a list of tools.", param="tools")
    return tools
