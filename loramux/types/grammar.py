"""The grammar of an answer, as a plain string that crosses the border of processes."""

from __future__ import annotations

import json
from typing import Literal, Self

import msgspec

from loramux.errors import InvalidRequest

GrammarKind = Literal["json_schema", "regex", "lark"]
Whitespace = Literal["compact", "any", "none"]


class GrammarOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of JSON schemas, those inside of a Lark grammar included."""

    whitespace: Whitespace = "compact"
    """What may stand between two parts of a JSON value. `compact`: a space or a newline; `any`: up
    to 64 characters of JSON whitespace; `none`: nothing."""
    whitespace_pattern: str | None = None
    """A regular expression of this whitespace, in place of `whitespace`."""
    lenient: bool = False
    """Leave out the keywords that cannot be enforced, instead of refusing the schema."""


class ReasoningMarks(msgspec.Struct, frozen=True):
    """What begins and ends the reasoning before an answer: token ids, or texts."""

    begin: int | str
    end: int | str
    is_open: bool
    """Whether the answer begins inside of it; otherwise there may be none."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer may look like; `SamplingParams.grammar` is its text."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression, or a Lark grammar in the dialect of llguidance."""
    options: GrammarOptions = GrammarOptions()
    reasoning: ReasoningMarks | None = None
    """The answer follows the grammar after its reasoning."""

    @classmethod
    def of_schema(cls, schema: object, **options: bool | str | None) -> Self:
        """Return the grammar of the JSON values that a schema (a dict, or a Boolean) allows."""
        whole = {} if schema is True else {"enum": []} if schema is False else schema
        text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
        return cls("json_schema", text, msgspec.convert(options, GrammarOptions))

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Parse the text that encode() made; raises InvalidRequest for any other."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(
                f"SamplingParams.grammar must be the text of a Grammar: {error}. Make it with "
                "Grammar.of_schema(schema).encode().",
                param="grammar",
            ) from error
