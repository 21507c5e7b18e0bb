"""POST /v1/fim/completions: the text between two others, in Mistral's form."""

from __future__ import annotations

from starlette.responses import Response

from loramux.server.context import Context
from loramux.server.families.openai import chat_events, complete_chat
from loramux.server.generate.asked import Asked
from loramux.server.generate.fim import FillPrompt
from loramux.server.generate.generation import Generation, RouteKind, collect, run
from loramux.server.generate.receipt_draft import ReceiptDraft, receipt_draft
from loramux.server.generate.requests import open_own, read_own
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import stream_events, until_gone
from loramux.wire.text import ChatCompletion, FimRequest

FIM = RouteKind(id_prefix="fim", prompt_param="prompt", default_max_tokens=None)


def fim_routes(context: Context) -> list[Route]:
    routes = Routes("Mistral")

    @routes.post("/v1/fim/completions", generating(FimRequest, ChatCompletion))
    async def fill_hole(request: Call) -> Response:
        """Generate the text between two others, complete or as a stream of chunks."""
        with receipt_draft(context.receipts, context.base_identity, request) as draft:
            generation = await _open_fim(context, request, draft)
        codec, deltas = generation.request.codec, run(context, generation)
        if generation.request.stream:
            return await stream_events(request, chat_events(generation, deltas, codec))
        choices, usage = await until_gone(request, collect(generation, deltas))
        return json_response(complete_chat(generation, choices, usage, codec))

    return routes.found


async def _open_fim(context: Context, http: Call, draft: ReceiptDraft) -> Generation:
    body, raw = await read_own(context, http, FimRequest)
    if body.seed is None:
        body.seed = body.random_seed
    asked = Asked(kind=FIM, body=body, prompts=[FillPrompt(body.prompt, body.suffix or "")])
    return await open_own(context, http, draft, asked, raw)
