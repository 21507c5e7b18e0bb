"""The grammar of a request, checked on a thread before the request is queued."""

from __future__ import annotations

import asyncio

from loramux.engine.grammar.library import check_grammar
from loramux.errors import InvalidRequest
from loramux.server.structured.fields import find_constraint, make_grammar
from loramux.server.wire import GenerationBody
from loramux.types.grammar import Grammar


async def grammar_of(body: GenerationBody) -> Grammar | None:
    """Return the grammar that the body asks for; raises InvalidRequest, with its field."""
    asked = find_constraint(body)
    if asked is None:
        return None

    def work() -> Grammar:
        grammar = make_grammar(asked)
        require_enforceable(grammar, asked.param)
        return grammar

    return await asyncio.to_thread(work)


def require_enforceable(grammar: Grammar, param: str) -> None:
    """Raise InvalidRequest, with the reason, for a grammar that cannot be enforced in full."""
    try:
        check_grammar(grammar)
    except ValueError as error:
        what = "schema" if grammar.kind == "json_schema" else "grammar"
        raise InvalidRequest(
            f"{param}: this {what} cannot be enforced: {error}. Leave this part out.", param=param
        ) from error
