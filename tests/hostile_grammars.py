"""Schemas and grammars that are made to take long: exponential, huge, deep or ambiguous ones.

`python -m tests.hostile_grammars` prints what the server says to each, and after how long.
"""

from __future__ import annotations

import json
import string
import time
from typing import Any

import msgspec

from loramux.engine.grammar.checking import check_apart
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.check import require_enforceable
from loramux.server.chat.structured.fields import find_constraint, make_grammar
from loramux.types.grammar import Grammar
from loramux.wire.text import GenerationBody

MIB = 1 << 20


def doubling_defs(keyword: str, depth: int = 40) -> dict[str, Any]:
    """Each definition names the next one twice."""
    defs: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(depth)
    }
    return {"$defs": defs | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def doubling_objects(depth: int = 40) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
        }
        for i in range(depth)
    }
    return {"$defs": defs | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def overlapping(count: int) -> dict[str, Any]:
    """Return an intersection of unions, which distributes to 3 to the power of `count` branches."""
    union = [
        {"properties": {"x": {"pattern": f"^{letter}"}, letter: {"type": "string"}}}
        for letter in "abc"
    ]
    return {"type": "object", "allOf": [{"anyOf": union} for _ in range(count)]}


def chain(length: int, keyword: str) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        target = {"$ref": f"#/$defs/d{i}"}
        if keyword == "$ref":
            return target
        return {keyword: [target] if keyword == "allOf" else {"a": target}}

    defs: dict[str, Any] = {f"d{i}": link(i + 1) for i in range(length)}
    return {"$defs": defs | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


SCHEMAS: dict[str, Any] = {
    "allOf that doubles": doubling_defs("allOf"),
    "anyOf that doubles": doubling_defs("anyOf"),
    "oneOf that doubles": doubling_defs("oneOf"),
    "objects that double": doubling_objects(),
    "reference to itself": {"$ref": "#"},
    "references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "allOf of itself": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "recursive tree": {
        "type": "object",
        "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}, "v": {"pattern": "(a|aa)+b"}},
    },
    "intersections of unions": overlapping(12),
    "65 levels": nested(65),
    "400 levels": nested(400),
    "1 MiB of properties": {
        "type": "object",
        "properties": {f"property number {i}": {"type": "string"} for i in range(16_000)},
    },
    "more than 1 MiB": {"description": "x" * (MIB + 1)},
    "enum of 10,000": {"enum": [f"value {i} {i * i}" for i in range(10_000)]},
    "enum of 100,000": {"enum": list(range(100_000))},
    "one long string": {"const": "ab" * 400_000},
    "minItems": {"type": "array", "minItems": 10**9},
    "maxItems of unions": {
        "type": "array",
        "maxItems": 10**6,
        "items": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    },
    "maxLength": {"type": "string", "minLength": 10**8, "maxLength": 10**9},
    "minProperties": {"type": "object", "minProperties": 10**6},
    "many numbers": {"type": "number", "multipleOf": 1e-300},
    "huge bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
    "patterns in patterns": {"type": "string", "pattern": "^(((a{1,30}){1,30}){1,30}){1,30}$"},
    "patternProperties": {
        "type": "object",
        "patternProperties": {f"^{'(x|y)*' * 8}{i}$": {"type": "string"} for i in range(300)},
    },
    "many patterns": {
        "type": "object",
        "properties": {f"p{i}": {"pattern": f"^([a-z]{{1,20}}{i})+$"} for i in range(500)},
    },
}
SCHEMAS |= {
    "chain of 5,000 references": chain(5_000, "$ref"),
    "chain of 5,000 allOf": chain(5_000, "allOf"),
    "chain of 5,000 objects": chain(5_000, "properties"),
    "deep pattern": {"type": "string", "pattern": "(" * 50_000 + "a" + ")" * 50_000},
    "many branches": {"anyOf": [{"const": {"a": i}} for i in range(5_000)]},
    "many alternatives of objects": {
        "anyOf": [
            {"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(2_000)
        ]
    },
    "required of many": {
        "type": "object",
        "properties": {f"p{i}": {} for i in range(3_000)},
        "required": [f"p{i}" for i in range(3_000)],
    },
    "2,000 optional": {"type": "object", "properties": {f"p{i}": {} for i in range(2_000)}},
    "many enums": {
        "type": "object",
        "properties": {f"p{i}": {"enum": [f"{i} {n}" for n in range(100)]} for i in range(500)},
    },
    "prefixItems": {"type": "array", "prefixItems": [{"type": "string"}] * 20_000},
}
PATTERNS: dict[str, str] = {
    "nested quantifiers": "((((a+)+)+)+)+$",
    "repeats of repeats": "((a{1,1000}){1,1000}){1,1000}",
    "exponential automaton": "(a|b)*a(a|b){200}",
    "long alternatives": "|".join(f"{i}[a-z]*{i * 7}" for i in range(5_000)),
    "intersecting classes": "(.*[aeiou].*){30}",
    "unicode classes": r"(\p{L}{1,200}\p{N}{1,200}){1,50}",
    "1 MiB": "a" * MIB,
    "deep groups": "(" * 100_000 + "a" + ")" * 100_000,
    "deep repeats": "(" * 200 + "a" + "){1,9}" * 200,
    "64 KiB": "ab" * 32_000,
    "many classes": "".join(f"[{chr(97 + i % 26)}-z]{{0,{i % 9 + 1}}}" for i in range(4_000)),
}
LARK: dict[str, str] = {
    "ambiguous": 'start: start start | "a" | ""',
    "left recursion": 'start: start "a" | "a"',
    "circle": "start: a\na: b\nb: a",
    "rules that double": "\n".join(
        ["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"']
    ),
    "empty rules that double": "\n".join(
        ["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: ""']
    ),
    "repeats": 'start: ("a"{1,100000} "b"){1,100000}',
    "terminals that double": "\n".join(
        ["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), "T40: /a/"]
    ),
    "20,000 rules": "\n".join(
        ["start: r0", *(f'r{i}: "a" r{i + 1} | "b"' for i in range(20_000)), 'r20000: "c"']
    ),
    "lexers": "start: " + " | ".join(f"/[{c}]*x{{1,500}}/" for c in string.ascii_letters),
    "2,000 rules": "\n".join(
        ["start: r0", *(f'r{i}: "a" r{i + 1} | "b"' for i in range(2_000)), 'r2000: "c"']
    ),
    "chain of terminals": "\n".join(
        ["start: T0", *(f'T{i}: T{i + 1} "a"' for i in range(5_000)), "T5000: /a/"]
    ),
    "one rule of 50,000": "start: " + " | ".join(f'"a{i}" start' for i in range(50_000)),
    "sequence of 50,000": "start: " + " ".join(f'"a{i}"' for i in range(50_000)),
    "depth": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "json in lark": "start: " + " ".join(["%json " + json.dumps({"type": "object"})] * 500),
}


def bodies() -> dict[str, dict[str, Any]]:
    """Return the fields of a request for each of them."""
    found = {f"schema: {name}": {"guided_json": value} for name, value in SCHEMAS.items()}
    found |= {f"regex: {name}": {"guided_regex": value} for name, value in PATTERNS.items()}
    return found | {f"lark: {name}": {"guided_grammar": value} for name, value in LARK.items()}


def main() -> None:
    """Print what the server says to each of them, and after how long."""
    check_apart(Grammar("regex", "warm"))
    rows = []
    for name, fields in bodies().items():
        began, said = time.perf_counter(), "accepted"
        try:
            asked = find_constraint(msgspec.convert(fields, GenerationBody))
            assert asked is not None
            require_enforceable(make_grammar(asked), asked.param)
        except InvalidRequest as error:
            said = str(error)
        rows.append((1e3 * (time.perf_counter() - began), name, said))
    for took_ms, name, said in sorted(rows):
        print(f"{took_ms:7.1f} ms  {name:40} {said[:100]}")


if __name__ == "__main__":
    main()
