"""Five turns of forced calls with SmolLM2 and trained adapters: every call is one of the tools'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.serve_factory import running_server

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
MODELS = ("base", *sorted(folder.parent.name for folder in ADAPTERS.glob("*/adapter_config.json")))
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "book_table": {
        "type": "object",
        "properties": {
            "guests": {"type": "integer", "minimum": 1, "maximum": 12},
            "time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
            "wishes": {
                "type": "array",
                "items": {"enum": ["window", "quiet", "terrace"]},
                "maxItems": 2,
            },
        },
        "required": ["guests", "time", "wishes"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("tools")
    modules = [f"{name}={ADAPTERS / name}" for name in MODELS[1:]]
    flags = ["--device", "cpu", "--served-model-name", "base", "--lora-modules", *modules]
    with (
        running_server(folder / "log", *flags) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as opened,
    ):
        yield opened


def checked(calls: list[Any], wanted: str | None) -> None:
    assert calls
    for call in calls:
        assert call.function.name == (wanted or call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_five_turns(client: OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Plan dinner in Rome, and mind the rain."}]
    for turn in range(5):
        wanted = ("weather", "book_table", None)[turn % 3]
        choice: Any = {"type": "function", "function": {"name": wanted}} if wanted else "required"
        asked: dict[str, Any] = {
            **{"model": model, "messages": messages, "tools": TOOLS, "tool_choice": choice},
            **{"max_tokens": 300, "seed": turn, "temperature": 0.7, "parallel_tool_calls": False},
        }
        if turn % 2:
            with client.chat.completions.stream(**asked) as stream:
                reply: Any = stream.get_final_completion().choices[0]
        else:
            reply = client.chat.completions.create(**asked).choices[0]
        assert reply.finish_reason == "tool_calls" and not reply.message.content
        checked(reply.message.tool_calls, wanted)
        messages.append(reply.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages[-1]["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
            for call in reply.message.tool_calls
        ]
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f'{{"ok": true, "turn": {turn}}}'}
            for call in reply.message.tool_calls
        ]
    # An answer of its own choice is text, or a call that the tools allow.
    last: Any = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, max_tokens=300, seed=9
    ).choices[0]
    if last.finish_reason == "tool_calls":
        checked(last.message.tool_calls, None)
    else:
        assert last.message.content is not None and not last.message.tool_calls
