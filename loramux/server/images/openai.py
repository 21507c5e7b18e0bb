"""POST /v1/images/generations in the form of OpenAI."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from loramux.backend.images import FinishedImage, ImageForm
from loramux.config.images import parse_size
from loramux.errors import InvalidRequest
from loramux.server.http.body import decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import Events, named_event, stream_events, until_gone
from loramux.server.images.choice import choose
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import Drawing, ImageDraft, image_draft
from loramux.server.images.lora_fields import named_adapters
from loramux.server.images.names import selection_of
from loramux.server.images.near_misses import check_names, names_in
from loramux.server.images.sources import size_of
from loramux.types.image import ImageRequest, SourceImage
from loramux.wire.images import ImageData, ImageGeneration, ImagesReply, ImageUsage

MAX_RANDOM_SEED = 2**32
# Fields of other image services, with the values that mean what this server does.
_ACCEPTED: Mapping[str, tuple[str | None, ...]] = {
    "response_format": (None, "b64_json"),
    "quality": (None, "auto", "standard"),
    "background": (None, "auto", "opaque"),
    "moderation": (None, "auto", "low"),
    "style": (None,),
}


def openai_routes(context: ImageContext) -> list[Route]:
    routes = Routes("images")

    @routes.post("/v1/images/generations", generating(ImageGeneration, ImagesReply))
    async def generate(request: Call) -> Response:
        """Draws images; with `stream` as server-sent events with partial images."""
        context.require_ready()
        with image_draft(context, request) as draft:
            raw = await read_body(request, context.max_body_bytes)
            body = decode(raw, ImageGeneration)
            check_names(names_in(raw), ImageGeneration)
            drawing = await make_drawing(context, body, request, draft)
            return await answer(request, drawing, body)

    return routes.found


async def answer(
    request: Call, drawing: Drawing, body: ImageGeneration, kind: str = "image_generation"
) -> Response:
    """Draws the images; `kind` begins the names of events."""
    if body.stream:
        return await stream_events(request, _events(drawing, kind))
    await until_gone(request, drawing.draw())
    return json_response(_reply(drawing))


async def make_drawing(
    context: ImageContext,
    body: ImageGeneration,
    http: Call,
    draft: ImageDraft,
    source: SourceImage | None = None,
) -> Drawing:
    """Check a body and make the requests of its images; their seeds follow one another."""
    caller = http.caller
    for name, values in _ACCEPTED.items():
        if getattr(body, name) not in values:
            allowed = " or ".join(str(value) for value in values if value) or "nothing"
            raise InvalidRequest(f"{name} must be {allowed} here.", param=name)
    count = body.n or 1
    if body.stream and count > 1:
        raise InvalidRequest("A stream has one image: set n to 1.", param="n")
    if body.partial_images and not body.stream:
        raise InvalidRequest("partial_images needs stream.", param="partial_images")
    caller = replace(caller, user=body.user)
    adapters, weights = named_adapters(body)
    draft.asked = "+".join(adapters or ()) or body.model
    chosen = await choose(context, caller, body.model, adapters, weights)
    seed = secrets.randbelow(MAX_RANDOM_SEED) if body.seed is None else body.seed
    width, height = _size(context, body, source)
    requests = [
        ImageRequest(
            request_id=f"img-{secrets.token_hex(12)}",
            prompt=body.prompt,
            negative_prompt=body.negative_prompt or "",
            width=width,
            height=height,
            steps=_steps(context, body),
            seed=seed + index,
            guidance_scale=body.guidance if body.guidance_scale is None else body.guidance_scale,
            true_cfg_scale=body.true_cfg_scale,
            sampler=body.sampler or "",
            max_sequence_length=body.max_sequence_length,
            partial_images=body.partial_images or 0,
            source=source,
            selection=selection_of(chosen),
            tenant=caller.tenant,
        )
        for index in range(count)
    ]
    quality = 100 if body.output_compression is None else body.output_compression
    form = ImageForm(format=body.output_format or "png", compression=quality)
    return Drawing(
        context=context,
        caller=caller,
        requests=requests,
        chosen=chosen,
        form=form,
        http=http,
        draft=draft,
    )


def _steps(context: ImageContext, body: ImageGeneration) -> int:
    given = body.steps if body.num_inference_steps is None else body.num_inference_steps
    return context.backend.card.default_steps if given is None else given


def _size(
    context: ImageContext, body: ImageGeneration, source: SourceImage | None
) -> tuple[int, int]:
    default = context.backend.card.default_size
    if body.width is not None or body.height is not None:
        if body.size not in (None, "auto"):
            raise InvalidRequest("Give size, or width and height.", param="size")
        return body.width or default, body.height or default
    if body.size not in (None, "auto"):
        return parse_size(body.size or "")
    return (default, default) if source is None else size_of(context.backend.card, source)


def _reply(drawing: Drawing) -> ImagesReply:
    receipt = drawing.receipt()
    return ImagesReply(
        created=int(time.time()),
        data=[ImageData(b64_json=_text(image.data)) for image in drawing.images],
        output_format=drawing.form.format,
        size=_size_text(drawing),
        usage=_usage(drawing.images),
        serving=None if receipt is None else receipt.body(),
        warnings=drawing.warnings,
    )


async def _events(drawing: Drawing, kind: str) -> Events:
    common = {
        "created_at": int(time.time()),
        "size": _size_text(drawing),
        "quality": "auto",
        "background": "opaque",
        "output_format": drawing.form.format,
    }
    num_partial = 0
    async for update in drawing.updates():
        if update.partial is not None:
            place = {"partial_image_index": num_partial}
            yield _event(f"{kind}.partial_image", update.partial, common, place)
            num_partial += 1
        if update.finished is not None:
            receipt = drawing.receipt()
            end: dict[str, Any] = {"usage": _usage(drawing.images)}
            if receipt is not None:
                end["serving"] = receipt.body()
            if drawing.warnings:
                end["warnings"] = drawing.warnings
            yield _event(f"{kind}.completed", update.finished.data, common, end)


def _event(name: str, data: bytes, common: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
    return named_event(name, {"type": name, "b64_json": _text(data), **common, **more})


def _usage(images: list[FinishedImage]) -> ImageUsage:
    prompt = sum(image.prompt_tokens for image in images)
    made = sum(image.image_tokens for image in images)
    return ImageUsage(
        input_tokens=prompt,
        output_tokens=made,
        total_tokens=prompt + made,
        input_tokens_details={"text_tokens": prompt, "image_tokens": 0},
    )


def _size_text(drawing: Drawing) -> str:
    return f"{drawing.requests[0].width}x{drawing.requests[0].height}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
