"""The grammar of a request, checked on a thread before the request is queued."""

from __future__ import annotations

from loramux.base.threads import GRAMMAR_CHECKS
from loramux.engine.grammar.checking import check_apart
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.fields import AskedConstraint, find_constraint, make_grammar
from loramux.types.grammar import Grammar
from loramux.wire.text import GenerationBody

_NOT_ENFORCED = ("not supported", "unsupported", "unimplemented", "not implemented", "oneof")
"""In errors about valid parts of a schema or grammar."""


async def grammar_of(body: GenerationBody) -> Grammar | None:
    """Return the grammar that the body asks for; raises InvalidRequest, with its field."""
    asked = find_constraint(body)
    return None if asked is None else await enforceable_grammar(asked)


async def enforceable_grammar(asked: AskedConstraint) -> Grammar:
    """Return the grammar of a constraint; raises InvalidRequest, with its field."""

    def work() -> Grammar:
        grammar = make_grammar(asked)
        require_enforceable(grammar, asked.param)
        return grammar

    return await GRAMMAR_CHECKS.run(work)


def require_enforceable(grammar: Grammar, param: str) -> None:
    """Raise InvalidRequest, with the reason, for a grammar that cannot be enforced in full."""
    try:
        check_apart(grammar)
    except ValueError as error:
        what = "schema" if grammar.kind == "json_schema" else "grammar"
        known = any(words in str(error).lower() for words in _NOT_ENFORCED)
        fix = "Leave this part out." if known else f"Correct the {what}."
        raise InvalidRequest(
            f"{param}: this {what} cannot be enforced: {error}. {fix}", param=param
        ) from error
