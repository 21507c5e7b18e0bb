"""The tools that a body defines, and which of them the answer must or may call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from loramux.engine.grammar.checking import check_apart
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.check import require_enforceable
from loramux.server.chat.structured.fields import check_size
from loramux.server.chat.structured.schema import check_depth, check_wellformed, prepare_schema
from loramux.types.grammar import Grammar, GrammarOptions

MAX_TOOLS = 512
COMPACT = GrammarOptions()
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ANY_PARAMETERS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if"))
"""Keywords by which a schema has its properties elsewhere."""

Mode = Literal["none", "auto", "required"]
_MODES: Mapping[str, Mode] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",  # Mistral's word.
}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    """The schema of the arguments, as the grammar takes it."""
    options: GrammarOptions
    definition: Mapping[str, Any]
    """The object that the request body has for it."""

    @property
    def grammar(self) -> Grammar:
        """The grammar of its arguments."""
        return Grammar("json_schema", json.dumps(self.parameters), self.options)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Mode
    tools: tuple[Tool, ...]
    """Those that may be called."""
    listed: tuple[Mapping[str, Any], ...] = ()
    """The definitions that the model reads."""
    is_named: bool = False
    dropped: dict[str, str] = field(default_factory=dict)
    """Tool -> why its schema is enforced in part only."""


def read_tools(
    tools: Sequence[Any] | None, choice: Any, options: GrammarOptions = COMPACT
) -> ToolChoice | None:
    """Return the tools and the choice of a body; None if it has none. It may take seconds.

    `options`: the whitespace of the arguments.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "When using `tool_choice`, `tools` must be set.", param="tool_choice"
            )
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    mode, wanted = _wanted(choice, tools)
    if mode == "none":
        return None
    dropped: dict[str, str] = {}
    found = [_read(tool, number, options, dropped) for number, tool in enumerate(tools)]
    check_size("".join(json.dumps(tool.parameters) for tool in found), "tools")
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    for name in wanted or ():
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names `{name}`, which is not one of the tools.", param="tool_choice"
            )
    return ToolChoice(
        mode,
        tuple(tool for tool in found if wanted is None or tool.name in wanted),
        tuple(tool.definition for tool in found),
        wanted is not None and not _is_allowing(choice),
        dropped,
    )


def _wanted(choice: Any, tools: Sequence[Any]) -> tuple[Mode, Sequence[str] | None]:
    """Return the mode, and the names of the tools that may be called; None: all."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str) and choice in _MODES:
        return _MODES[choice], None
    if isinstance(choice, str) and any(_name(tool) == choice for tool in tools):
        return "required", [choice]  # TGI's form.
    if _is_allowing(choice):
        return _allowed(choice)
    name = _name(choice)
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required", '
            '{"type": "function", "function": {"name": …}}, or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto", "tools": […]}}.',
            param="tool_choice",
        )
    return "required", [name]


def _is_allowing(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _allowed(choice: Mapping[str, Any]) -> tuple[Mode, Sequence[str]]:
    """Return the mode and the names of a choice among some of the tools, which are all listed."""
    inner = choice.get("allowed_tools")
    # Responses has both fields, and the names of functions, without an object around them.
    fields: Mapping[str, Any] = inner if isinstance(inner, dict) else choice
    mode, tools = fields.get("mode"), fields.get("tools")
    names = [_allowed_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise InvalidRequest(
            "tool_choice of type allowed_tools needs a mode, auto or required, and tools, a list "
            "of functions with their names.",
            param="tool_choice",
        )
    return mode, [name for name in names if name is not None]


def _allowed_name(tool: Any) -> str | None:
    name = _name(tool)
    if name is None and isinstance(tool, dict):
        name = tool.get("name")
    return name if isinstance(name, str) else None


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _read(tool: Any, number: int, options: GrammarOptions, dropped: dict[str, str]) -> Tool:
    place = f"tools[{number}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise _refusal(f"{place} must be of type function.")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(
            f"{place}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores."
        )
    given = function.get("parameters")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise _refusal(f"{place}.function.parameters must be a JSON schema, an object.")
    check_depth(given, "tools")
    check_wellformed(given, f"{place}.function.parameters", "tools")
    if "object" not in given.get("type", "object"):
        raise _refusal(f"{place}.function.parameters.type must be object.")
    # A schema that names no argument is that of a function without arguments.
    empty: dict[str, Any] = {} if given.keys() & _ANY_PARAMETERS else {"properties": {}}
    schema = prepare_schema({"type": "object"} | empty | given, closes_objects=True)
    read = Tool(name, schema, options, tool)
    if function.get("strict") is True:
        require_enforceable(read.grammar, "tools")
        return read
    return _lenient(read, dropped)


def _lenient(tool: Tool, dropped: dict[str, str]) -> Tool:
    """Return a tool with as much of its schema as can be enforced."""
    for options in (tool.options, structs.replace(tool.options, lenient=True)):
        tried = replace(tool, options=options)
        try:
            check_apart(tried.grammar)
        except ValueError as error:
            dropped.setdefault(tool.name, str(error).partition("\n")[0])
        else:
            return tried
    return replace(tool, parameters={"type": "object"})


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools")
