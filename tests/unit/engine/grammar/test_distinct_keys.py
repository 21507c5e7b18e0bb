"""No object of an answer repeats a key, in whatever spelling, and no answer comes to a dead end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from loramux.engine.grammar.constraint import Constraint
from loramux.engine.grammar.constraints import Compiled
from loramux.engine.grammar.library import Tables, tokenizer_json
from loramux.engine.grammar.open_objects import has_open_objects
from loramux.engine.tokenizer import Tokenizer
from loramux.types.grammar import Grammar, ReasoningMarks
from loramux.types.sampling import SamplingParams
from tests.tokenizer_factory import save_byte_fallback

BYTES = [bytes([byte]) for byte in range(256)]
# As the vocabularies of models have, and longer ones that complete a key from anywhere.
PIECES = [
    *(
        b'","',
        b'":"',
        b'{"',
        b'":',
        b"\\u",
        b"\\u00",
        b"61",
        b"0061",
        b"u0061",
        b'\\"',
        b"ab",
        b"aa",
    ),
    *(b'"a"', b'"a":', b'a"', b'a":1,"a', b',"a":', b'{"a":1,"a":', b'1,"', b'1,"a"', b'"},"'),
    *(b'","a":', b'","\\u0061', b'"a":1,"b":1,', b'":1,', b'":null,', b'":1,"', b' "', b', "'),
    *("é".encode(), b'"b', b'"b"', b'],"', b'{"b":{"b":', b"}}", b'"aa', b'":{"a'),
]
EOS = 0


def _spelled(text: bytes) -> str:
    """Return a text of bytes in the letters of a byte-level vocabulary."""
    return "".join(BYTE_LETTERS[byte] for byte in text)


def _byte_letters() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()


@pytest.fixture(scope="module")
def tables() -> Tables:
    texts = [_spelled(text) for text in [*BYTES, *PIECES]]
    vocabulary = {"<end>": EOS, **{text: number for number, text in enumerate(texts, 1)}}
    added = {"id": EOS, "content": "<end>", "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [added],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    return Tables(tokenizer, eos_token_ids=(EOS,), vocab_size=len(vocabulary))


def constraint_of(tables: Tables, grammar: Grammar) -> Constraint:
    compiled = Compiled(tables.compile(grammar), grammar, tables.texts)
    return Constraint(
        SamplingParams(),
        (EOS,),
        compiled.matcher.deep_copy(),
        vocab_size=len(tables.texts.texts),
        distinct_keys=compiled.distinct_keys(),
    )


def allowed(tables: Tables, constraint: Constraint) -> list[int]:
    """Return the tokens that may follow, by the mask that a step computes."""
    assert constraint.matcher is not None
    words = np.frombuffer(constraint.matcher.compute_bitmask(), dtype=np.int32).copy()
    constraint.restrict(words, [])
    assert constraint.error is None, constraint.error
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [token for token in np.flatnonzero(bits).tolist() if token < len(tables.texts.texts)]


def takes(tables: Tables, grammar: Grammar, text: str) -> str:
    """Return the part of a text that may be written, a byte at a time."""
    constraint, texts = constraint_of(tables, grammar), tables.texts
    for position, byte in enumerate(text.encode()):
        token = texts.spell(bytes([byte]))
        assert token is not None
        if token[0] not in allowed(tables, constraint):
            return text.encode()[:position].decode()
        constraint.accept(token[0])
    return text


LIKELY = set(b'"ab,:{}[]1\\u06')


def walk(tables: Tables, grammar: Grammar, draw: random.Random, num_tokens: int = 60) -> str | None:
    """Return a random answer that tries to repeat keys; None if it did not end."""
    constraint, texts = constraint_of(tables, grammar), tables.texts.texts
    written = b""
    for step in range(4 * num_tokens):
        assert constraint.matcher is not None
        if constraint.is_complete:
            break
        found = allowed(tables, constraint)
        if EOS in found and (step >= num_tokens or len(found) == 1 or draw.random() < 0.1):
            break
        found = [token for token in found if token != EOS]
        likely = [token for token in found if set(texts[token]) <= LIKELY] or found
        ends = [token for token in likely if texts[token] in (b"}", b"]", b'"', b"1", b":")]
        token = draw.choice(ends if step > num_tokens and ends else likely)
        written += texts[token]
        constraint.accept(token)
    else:
        return None
    return written.decode()


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), f"a key repeats: {names}"
    return dict(pairs)


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of objects whose keys are free, bound by patterns, or declared."""
    if depth == 2 or (depth and draw.random() < 0.4):
        return {"type": draw.choice(["integer", "string", "null", "boolean"])}
    inner = [random_schema(draw, depth + 1) for _ in range(3)]
    declared = dict(zip(draw.sample(["a", "b", 'q"', "é", "ab"], 2), inner, strict=False))
    required = draw.sample(list(declared), draw.randint(0, 2))
    match draw.randint(0, 5):
        case 0:
            return {"type": "array", "items": inner[0], "maxItems": 3}
        case 1:
            pattern = draw.choice(["^[ab]$", "^(a|ab|b)$", "^a{1,3}$", "^a+$", "^(aa|ab|é)$"])
            return {"type": "object", "patternProperties": {pattern: inner[0]},
                    "additionalProperties": False}  # fmt: skip
        case 2:
            return {"anyOf": [{"type": "object", "properties": declared}, {"type": "null"}]}
        case 3:
            return {"type": "object", "minProperties": draw.randint(0, 3)}
    return {"type": "object", "properties": declared, "required": required,
            "additionalProperties": draw.choice([True, inner[2]])}  # fmt: skip


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_of_random_open_schemas_never_repeat_a_key(tables: Tables, seed: int) -> None:
    draw = random.Random(seed)
    num_ended = 0
    for _ in range(60):
        schema = random_schema(draw)
        text = walk(tables, Grammar.of_schema(schema), draw)
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text, object_pairs_hook=distinct), schema)
    assert num_ended >= 40


OPEN = Grammar.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("text", "stops_after"),
    [
        ('{"b":1,"b":2}', '{"b":1,"b'),
        ('{"\\u0062":1}', '{"\\'),
        ('{"b\\u0062":1}', '{"b\\'),
        ('{"\\\\":1,"\\\\":2}', '{"\\\\":1,"\\\\'),
        ('{"\\"":1,"\\"":2}', '{"\\"":1,"\\"'),
        ('{"é":1,"é":2}', '{"é":1,"é'),
        ('{"":1,"":2}', '{"":1,"'),
        ('{"b":{"c":1,"c":2}}', '{"b":{"c":1,"c'),
        ('{"b":[{"c":1},{"c":1,"c":2}]}', '{"b":[{"c":1},{"c":1,"c'),
        ('{"b":"\\",\\"b","b":2}', '{"b":"\\",\\"b","b'),
    ],
)
def test_a_repeated_key_ends_where_it_would_be_complete(
    tables: Tables, text: str, stops_after: str
) -> None:
    assert takes(tables, OPEN, text) == stops_after


@pytest.mark.parametrize(
    "text",
    [
        '{"b":1,"bb":2,"c":{"b":1}}',
        '{"b":[{"b":1},{"b":2}],"é":"b","B":"\\u001f"}',
        '{"a":1,"\\n":{"\\\\":"","\\"":"{","/":[]}}',
    ],
)
def test_keys_that_differ_are_taken(tables: Tables, text: str) -> None:
    assert takes(tables, OPEN, text) == text


def test_a_comma_needs_a_key_that_may_follow(tables: Tables) -> None:
    names = {"type": "object", "patternProperties": {"^(aa?|b)$": {"type": "null"}}}
    grammar = Grammar.of_schema({**names, "additionalProperties": False})
    whole = '{"aa":null,"b":null,"a":null}'
    assert takes(tables, grammar, whole) == whole
    assert takes(tables, grammar, whole[:-1] + ',"') == whole[:-1]
    assert takes(tables, grammar, '{"aa":null,"a":null,"a') == '{"aa":null,"a":null,"'


def test_a_key_repeats_where_the_schema_leaves_no_other(tables: Tables) -> None:
    names = {"patternProperties": {"^a$": {"type": "null"}}, "additionalProperties": False}
    grammar = Grammar.of_schema({"type": "object", "minProperties": 2, **names})
    assert takes(tables, grammar, '{"a":null,"a":null}') == '{"a":null,"a":null}'


def test_tokens_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    save_byte_fallback(tmp_path)
    vocab_size = Tokenizer(tmp_path).vocab_size
    spaced = Tables(tokenizer_json(tmp_path), eos_token_ids=(EOS,), vocab_size=vocab_size)
    assert takes(spaced, OPEN, '{"né": 1, "b": "x", "né": 2}') == '{"né": 1, "b": "x", "né'


TEXT_BEFORE = """%llguidance {}
start: text | trigger call "</call>" rest
trigger[lazy]: /(.|\\n)*/ "<call>"
text: TEXT
TEXT: /(.|\\n)*/ & ~/(.|\\n)*<call>(.|\\n)*/
rest: /(.|\\n)*/
call: %json {"type": "object"}"""


@pytest.mark.parametrize("reasoning", [None, ReasoningMarks("<think>", "</think>", is_open=True)])
def test_free_text_may_hold_what_looks_like_an_object(
    tables: Tables, reasoning: ReasoningMarks | None
) -> None:
    grammar = Grammar("lark", TEXT_BEFORE, reasoning=reasoning)
    begin = 'So {"a":1,"a":2} { "x</think>' if reasoning else ""
    before = begin + 'as {"b":1,"b":2} or {" or " <call>{"a":1,'
    assert takes(tables, grammar, before + '"a":2}') == before + '"a'
    after = before + '"b":{}}</call> then {"b":1,"b":1}'
    assert takes(tables, grammar, after) == after


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "array"}, True),
        ({"type": ["string", "integer", "null"]}, False),
        ({"enum": [{"a": 1}]}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, True),
        ({"type": "object", "properties": {"a": False}, "additionalProperties": False}, False),
        ({"type": "object", "additionalProperties": {"type": "null"}}, True),
        ({"type": "array", "items": {"type": "null"}}, False),
        ({"anyOf": [{"type": "null"}, {"type": "object"}]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, True),
        ({"type": "object", "patternProperties": {"a": False},
          "additionalProperties": False}, True),
    ],
)  # fmt: skip
def test_open_objects_are_found_in_schemas_and_in_lark(
    schema: dict[str, Any], is_open: bool
) -> None:
    assert has_open_objects(Grammar.of_schema(schema)) == is_open
    assert has_open_objects(Grammar("lark", f"start: %json {json.dumps(schema)}")) == is_open
    assert not has_open_objects(Grammar("regex", json.dumps(schema)))
