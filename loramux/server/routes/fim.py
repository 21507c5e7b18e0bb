"""POST /v1/fim/completions: the text between two others, in Mistral's form."""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from loramux.server.context import Context
from loramux.server.generate.fim import Filler, FillPrompt
from loramux.server.generate.generation import Generation, RouteKind, collect, open_generation, run
from loramux.server.generate.prompts import off_loop
from loramux.server.generate.receipt_draft import ReceiptDraft, receipt_draft
from loramux.server.generate.requests import read_generation_body, resolve_request
from loramux.server.generate.sampling import Logprobs
from loramux.server.generate.selection import ModelReference, combination_of
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import stream_events, until_gone
from loramux.server.routes.openai import chat_events, complete_chat
from loramux.wire.text import ChatCompletion, FimRequest

FIM = RouteKind(id_prefix="fim", prompt_param="prompt", default_max_tokens=None)


def fim_routes(context: Context) -> list[Route]:
    routes = Routes("Mistral")

    @routes.post("/v1/fim/completions", generating(FimRequest, ChatCompletion))
    async def fill_hole(request: Call) -> Response:
        """Generates the text between two others, complete or as a stream of chunks."""
        with receipt_draft(context.receipts, context.base_identity, request) as draft:
            generation = await _open_fim(context, request, draft)
        codec, deltas = generation.request.codec, run(context, generation)
        if generation.request.stream:
            return await stream_events(request, chat_events(generation, deltas, codec))
        choices, usage = await until_gone(request, collect(generation, deltas))
        return json_response(complete_chat(generation, choices, usage, codec))

    return routes.found


async def _open_fim(context: Context, http: Call, draft: ReceiptDraft) -> Generation:
    body, raw = await read_generation_body(context, http, FimRequest)
    if body.seed is None:
        body.seed = body.random_seed
    reference = ModelReference(
        body.model, body.adapters, body.adapter_weights, combination=combination_of(body)
    )
    draft.asked = str(reference) or None
    request = await resolve_request(
        context, http, draft, body, FIM, raw=raw, reference=reference, logprobs=Logprobs()
    )
    filler = Filler(request.codec)
    hole = FillPrompt(body.prompt, body.suffix or "")
    max_model_len = context.backend.card.max_model_len
    token_ids = await off_loop(len(raw), lambda: filler.encode(hole, max_model_len=max_model_len))
    request = replace(request, params=filler.end(request.params), prompts=(tuple(token_ids),))
    return open_generation(context, http, request, draft)
