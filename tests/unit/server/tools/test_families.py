"""Formats of tool calls: recognition, and grammar and parser that agree."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from loramux.config.serve import TOOL_CALL_PARSERS
from loramux.engine.grammar.library import Tables, tokenizer_json
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest
from loramux.server.chat.tools.definitions import read_tools
from loramux.server.chat.tools.families import (
    FAMILIES,
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    Family,
    family_named,
    family_of_template,
    find_family,
)
from loramux.server.chat.tools.parser import Arguments, CallBegin, CallParser, Text
from loramux.server.chat.tools.plan import call_grammar
from loramux.types.grammar import Grammar, GrammarOptions
from tests.tokenizer_factory import save_byte_level

EOS = 2
RAW: Any = {"skip_special_tokens": False}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 9},
                    "n": {"$ref": "#/$defs/n"},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"n": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "time.zone")
]
ONE, TWO = '{"city": "R}\\"o"}', '{"city": "", "n": 5}'
# Family -> (one call, two calls)
CALLS = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "time.zone", "arguments": {TWO}}}\n</tool_call>',
    ),
    "llama3_json": (
        f'{{"name": "weather", "parameters": {ONE}}}',
        f'{{"name": "weather", "parameters": {ONE}}}; {{"name": "time.zone", "parameters": {TWO}}}',
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ONE}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ONE}}}, '
        f'{{"name": "time.zone", "arguments": {TWO}}}]',
    ),
    "mistral_args": (
        f"[TOOL_CALLS]weather[ARGS]{ONE}",
        f"[TOOL_CALLS]weather[ARGS]{ONE}[TOOL_CALLS]time.zone[ARGS]{TWO}",
    ),
    "generic": (f'{{"tool_call": {{"name": "weather", "arguments": {ONE}}}}}', None),
}
TEXTS = ("", "Hello, <tool or [TOOL_CALLS", 'a "quoted" \\ text\nand { more }')


class Codec:
    """A byte-level tokenizer, with the marks of some families as tokens or without."""

    def __init__(self, folder: Path, marks: tuple[str, ...] = ()) -> None:
        save_byte_level(folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        first = max(token["id"] for token in content["added_tokens"]) + 1
        for number, mark in enumerate(marks):
            token = {"content": mark, "id": first + number, "special": True, "normalized": False}
            flags = {"single_word": False, "lstrip": False, "rstrip": False}
            content["added_tokens"].append(token | flags)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        self.tokenizer = Tokenizer(folder)
        self.tables = Tables(tokenizer_json(folder), eos_token_ids=[EOS], vocab_size=512)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether the text, ended by EOS, is an answer of the grammar."""
        matcher = self.tables.compile(grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_whole = all(matcher.is_stopped() is False and matcher.consume_token(i) for i in ids)
        return is_whole and (matcher.is_stopped() or matcher.is_accepting())


@pytest.fixture(scope="module", params=[False, True], ids=["text marks", "token marks"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]") if request.param else ()
    return Codec(tmp_path_factory.mktemp("tokenizer"), marks)


def grammar_of(
    family: Family, codec: Codec, choice: Any = "auto", *, is_parallel: bool = True, **more: Any
) -> Grammar:
    found = read_tools(TOOLS, choice, GrammarOptions())
    assert found is not None and not found.dropped
    return call_grammar(family, found, codec.tokenizer, is_parallel=is_parallel, **more)


def parse(family: Family, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls that pieces of this size make."""
    parser = CallParser(family)
    pieces = [p for i in range(0, len(text), size) for p in parser.push(text[i : i + size])]
    said, calls = "", []
    for piece in [*pieces, *parser.flush()]:
        match piece:
            case Text(text=more):
                said += more
            case CallBegin(index=index, name=name):
                assert index == len(calls)
                calls.append([name, ""])
            case Arguments(index=index, text=more):
                calls[index][1] += more
    return said, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", CALLS)
def test_grammar_and_parser_agree_on_calls(codec: Codec, name: str) -> None:
    family, (one, two) = FAMILIES[name], CALLS[name]
    auto, required = grammar_of(family, codec), grammar_of(family, codec, "required")
    for text, calls in ((one, [("weather", ONE)]), (two, [("weather", ONE), ("time.zone", TWO)])):
        if text is None:
            continue
        assert codec.accepts(auto, text) and codec.accepts(required, text)
        for size in (1, 3, 1000):
            assert parse(family, text, size) == ("", calls)
    if two is not None:
        assert not codec.accepts(grammar_of(family, codec, is_parallel=False), two)


@pytest.mark.parametrize("name", CALLS)
def test_text_without_calls(codec: Codec, name: str) -> None:
    family = FAMILIES[name]
    auto = grammar_of(family, codec)
    for text in TEXTS:
        whole = json.dumps({"response": text}) if family.wraps_text else text
        assert codec.accepts(auto, whole), text
        assert not codec.accepts(grammar_of(family, codec, "required"), whole)
        for size in (1, 5, 1000):
            assert parse(family, whole, size) == (text, [])


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args"])
def test_text_before_calls(codec: Codec, name: str) -> None:
    text = "I look.\n" + CALLS[name][0]
    assert codec.accepts(grammar_of(FAMILIES[name], codec), text)
    assert parse(FAMILIES[name], text, 2) == ("I look.\n", [("weather", ONE)])


@pytest.mark.parametrize("name", CALLS)
def test_neither_unknown_names_nor_undeclared_arguments_are_possible(
    codec: Codec, name: str
) -> None:
    family, one = FAMILIES[name], CALLS[name][0]
    named = {"type": "function", "function": {"name": "time.zone"}}
    for choice in ("auto", "required"):
        grammar = grammar_of(family, codec, choice)
        assert not codec.accepts(grammar, one.replace("weather", "delete"))
        assert not codec.accepts(grammar, one.replace('"city"', '"town"'))
    assert not codec.accepts(grammar_of(family, codec, named), one)
    assert codec.accepts(grammar_of(family, codec, named), one.replace("weather", "time.zone"))


def random_answer(codec: Codec, grammar: Grammar, draw: random.Random) -> str | None:
    """Return an answer of random allowed tokens; None if it does not end."""
    matcher, tokens = codec.tables.compile(grammar), []
    for _ in range(400):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        # Strings and texts end soon.
        ends = [token for token in allowed if codec.tokenizer.token_bytes(token)[:1] in b'"}]']
        tokens.append(EOS if EOS in allowed else draw.choice(ends or allowed))
        assert matcher.consume_token(tokens[-1])
        if matcher.is_stopped():
            return codec.tokenizer.decode([one for one in tokens if one != EOS], **RAW)
    return None


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_random_answers_are_calls_of_the_tools(codec: Codec, name: str, choice: str) -> None:
    grammar, draw = grammar_of(FAMILIES[name], codec, choice), random.Random(name)
    answers = [random_answer(codec, grammar, draw) for _ in range(12)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) > 6
    for answer in ended:
        _, calls = parse(FAMILIES[name], answer, 4)
        assert calls or choice == "auto"
        for called, arguments in calls:
            (tool,) = [one["function"] for one in TOOLS if one["function"]["name"] == called]
            jsonschema.validate(json.loads(arguments), tool["parameters"])


def test_a_wrapped_text_is_decoded_in_pieces() -> None:
    text = 'a\u00e9"\\\n\U0001f642 \ud83d!'
    whole = json.dumps({"response": text})
    for size in (1, 2, 7, 100):
        said, calls = parse(GENERIC, whole, size)
        assert said == text.replace("\ud83d", "\ufffd") and not calls


def test_an_answer_that_is_cut_keeps_what_it_has() -> None:
    cut = CALLS["hermes"][0][:50]
    assert parse(HERMES, "Hi " + cut, 4)[0] == "Hi "
    assert parse(HERMES, "Hi <tool_c", 4) == ("Hi <tool_c", [])
    assert parse(GENERIC, '{"response": "abc\\', 4) == ("abc", [])


def test_an_answer_without_calls_follows_the_schema_beside_tools(codec: Codec) -> None:
    schema = Grammar.of_schema({"type": "integer"})
    grammar = grammar_of(HERMES, codec, content=schema)
    assert codec.accepts(grammar, "15") and codec.accepts(grammar, CALLS["hermes"][0])
    assert not codec.accepts(grammar, "x")
    generic = grammar_of(GENERIC, codec, content=schema)
    assert codec.accepts(generic, '{"response": 15}')
    parser = CallParser(GENERIC, is_raw=True)
    pieces = parser.push('{"response": 1') + parser.push("5}") + parser.flush()
    assert pieces == [Text("1"), Text("5")]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function={{ name }}>{% endif %}", GENERIC),
        ("{% if tools %}<|start_header_id|> <|python_tag|>{% endif %}", LLAMA3),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", MISTRAL_ARGS),
        ("{{ messages }}", GENERIC),
        ("", GENERIC),
    ],
)
def test_the_chat_template_tells_the_format(template: str, family: Family) -> None:
    assert family_of_template(template) is family


def test_the_format_may_be_named(codec: Codec) -> None:
    assert find_family(codec.tokenizer) is GENERIC
    assert find_family(codec.tokenizer, "qwen") is HERMES
    assert set(TOOL_CALL_PARSERS) == set(FAMILIES)
    with pytest.raises(InvalidRequest, match="hermes"):
        family_named("hermse")
