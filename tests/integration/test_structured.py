"""Structured output and tools of a live server, by the openai package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from loramux.engine.tokenizer import Tokenizer
from tests.engine_factory import save_model_with_tokenizer
from tests.hostile_grammars import bodies
from tests.serve_factory import running_server

pytestmark = pytest.mark.slow


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    country: Literal["IT", "FR", "DE"]
    height: int = Field(ge=0, le=9)


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["city"]
    place: Place
    tags: list[Literal["old", "big"]] = Field(max_length=2)


MESSAGES: list[Any] = [{"role": "user", "content": "A city?"}]
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
TOOLS: list[Any] = [
    openai.pydantic_function_tool(Place, name="place"),
    openai.pydantic_function_tool(City, name="city"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_model_with_tokenizer(folder / "model", max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, Any]:
    """Return a random model writes much whitespace where JSON allows it, unless it is
    told not to.
    """
    tokenizer = Tokenizer(folder / "model")
    blank = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).strip()]
    bias = dict.fromkeys(map(str, blank), -100)
    return {"model": "tiny", "max_tokens": 200, "logit_bias": bias}


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[OpenAI]:
    flags = ("--model", str(folder / "model"), "--device", "cpu", "--device-memory", "64MiB")
    with (
        running_server(folder / "log", *flags, "--served-model-name", "tiny") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as opened,
    ):
        yield opened


def test_parse_of_a_pydantic_model(client: OpenAI, settings: dict[str, Any]) -> None:
    reply = client.chat.completions.parse(
        messages=MESSAGES, response_format=City, seed=1, **settings
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, City)


def test_a_stream_gives_the_same_answer(client: OpenAI, settings: dict[str, Any]) -> None:
    asked: Any = settings | {"messages": MESSAGES, "response_format": CITY, "seed": 4}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    City.model_validate_json(whole or "")
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_completions_with_several_choices(client: OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="A word:", n=3, seed=1, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert {choice.text for choice in reply.choices} <= {"yes", "no"}


def test_a_grammar_that_does_not_compile_is_refused_with_400(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown special token"):
        client.completions.create(
            model="tiny", prompt="hi", extra_body={"guided_grammar": "start: <nope>"}
        )


def test_five_turns_of_forced_calls(client: OpenAI, settings: dict[str, Any]) -> None:
    messages = list(MESSAGES)
    for turn in range(5):
        wanted = ("place", "city")[turn % 2]
        choice: Any = {"type": "function", "function": {"name": wanted}}
        reply = client.chat.completions.parse(
            messages=messages,
            tools=TOOLS,
            tool_choice=choice if turn != 4 else "required",
            seed=turn,
            **settings,
        ).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.content is None
        (call,) = reply.message.tool_calls or []
        assert turn == 4 or call.function.name == wanted
        assert isinstance(call.function.parsed_arguments, Place | City)
        messages.append(reply.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"})


def test_a_stream_of_calls_is_joined_by_the_client(
    client: OpenAI, settings: dict[str, Any]
) -> None:
    with client.chat.completions.stream(
        messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=3, **settings
    ) as stream:
        reply = stream.get_final_completion().choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls or []
    assert json.loads(call.function.arguments)
    assert isinstance(call.function.parsed_arguments, Place | City)


def test_grammars_of_other_servers_apis(client: OpenAI, settings: dict[str, Any]) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "generate": {
            "inputs": "A city?",
            "parameters": {"grammar": {"type": "regex", "value": "[a-c]{3}"}, "max_new_tokens": 9},
        },
        "completion": {"prompt": "A city?", "grammar": 'root ::= [a-c] "x"', "n_predict": 9},
        "api/chat": {
            **{"model": "tiny", "messages": MESSAGES, "stream": False},
            "format": {"enum": ["old", "big"]},
        },
    }
    root = str(client.base_url).removesuffix("v1/")
    answers = {path: client.post(root + path, cast_to=dict, body=bodies[path]) for path in bodies}
    assert re.fullmatch("[a-c]{3}", answers["generate"]["generated_text"])
    assert re.fullmatch("[a-c]x", answers["completion"]["content"])
    assert json.loads(answers["api/chat"]["message"]["content"]) in ("old", "big")
    message = client.post(
        "/messages",
        cast_to=dict,
        body={
            **{"max_tokens": 200, "messages": MESSAGES, "tool_choice": {"type": "any"}},
            "tools": [{"name": "place", "input_schema": Place.model_json_schema()}],
        },
    )
    assert message["stop_reason"] in ("tool_use", "max_tokens")
    if message["stop_reason"] == "tool_use":
        Place.model_validate(message["content"][0]["input"])


HOSTILE = bodies()
CRASHING = ("schema: chain of 5,000 objects", "schema: patternProperties", "lark: 2,000 rules")


def answer_while_streaming(client: OpenAI, names: Iterable[str]) -> dict[str, int]:
    """Return the status of each hostile body, sent while a stream generates."""
    statuses = {}
    with client.completions.create(
        model="tiny", prompt="hi", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        chunks = iter(stream)
        next(chunks)
        for name in names:
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 3, **HOSTILE[name]}
            reply = httpx.post(f"{client.base_url}completions", json=body, timeout=240)
            # A limit of the parser that is reached while it runs ends the request.
            is_limit = "The grammar failed: " in reply.text
            statuses[name] = 400 if is_limit else reply.status_code
            next(chunks)
    return statuses


def test_hostile_grammars_are_refused_and_others_go_on(client: OpenAI) -> None:
    assert set(answer_while_streaming(client, CRASHING).values()) == {400}
    reply = client.completions.create(
        model="tiny", prompt="hi", extra_body={"guided_choice": ["yes"]}
    )
    assert reply.choices[0].text == "yes"


@pytest.mark.slow
def test_no_hostile_grammar_harms_the_server(client: OpenAI) -> None:
    names = list(HOSTILE)
    for start in range(0, len(names), 20):
        found = answer_while_streaming(client, names[start : start + 20])
        assert set(found.values()) <= {200, 400}, found
    health = httpx.get(f"{str(client.base_url).removesuffix('v1/')}health").json()
    assert (health["status"], health["restarts"]) == ("ready", 0)
