"""POST /v1/images/generations in the form of OpenAI."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.config.images import parse_size
from loramux.errors import InvalidRequest
from loramux.image_backend import FinishedImage, ImageForm
from loramux.server.body import json_response, read_json
from loramux.server.caller import Caller, caller_of
from loramux.server.images.choice import choose
from loramux.server.images.drawing import Drawing, ImageContext, ImageDraft, image_draft
from loramux.server.images.names import selection_of
from loramux.server.images.wire import ImageData, ImageGeneration, ImagesReply, Usage
from loramux.server.openapi import generating
from loramux.server.streaming import Events, named_event, stream_events, until_gone
from loramux.types.image import ImageRequest

MAX_RANDOM_SEED = 2**32
_EXAMPLE = {"prompt": "a red fox", "size": "512x512", "adapters": ["ink"]}
# Fields of other image services, with the values that mean what this server does.
_ACCEPTED: Mapping[str, tuple[str | None, ...]] = {
    "response_format": (None, "b64_json"),
    "quality": (None, "auto", "standard"),
    "background": (None, "auto", "opaque"),
    "moderation": (None, "auto", "low"),
    "style": (None,),
}


def openai_routes(context: ImageContext) -> APIRouter:
    router = APIRouter(tags=["images"])

    @router.post("/v1/images/generations", **generating(ImageGeneration, ImagesReply, _EXAMPLE))
    async def generate(request: Request) -> Response:
        """Draws images; with `stream` as server-sent events with partial images."""
        context.require_ready()
        with image_draft(context, request) as draft:
            body, _ = await read_json(request, ImageGeneration, max_bytes=context.max_body_bytes)
            draft.asked = "+".join(body.adapters or ()) or body.model
            drawing = await make_drawing(context, caller_of(request), body, request, draft)
            if body.stream:
                return await stream_events(request, _events(drawing))
            await until_gone(request, drawing.draw())
            return json_response(_reply(drawing))

    return router


async def make_drawing(
    context: ImageContext,
    caller: Caller,
    body: ImageGeneration,
    http: Request | None = None,
    draft: ImageDraft | None = None,
) -> Drawing:
    """Checks a body and makes the requests of its images; their seeds follow one another."""
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
    chosen = await choose(context, caller, body.model, body.adapters, body.adapter_weights)
    seed = secrets.randbelow(MAX_RANDOM_SEED) if body.seed is None else body.seed
    width, height = _size(context, body)
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


def _size(context: ImageContext, body: ImageGeneration) -> tuple[int, int]:
    default = context.backend.card.default_size
    if body.width is not None or body.height is not None:
        if body.size not in (None, "auto"):
            raise InvalidRequest("Give size, or width and height.", param="size")
        return body.width or default, body.height or default
    return (default, default) if body.size in (None, "auto") else parse_size(body.size or "")


def _reply(drawing: Drawing) -> ImagesReply:
    receipt = drawing.receipt()
    return ImagesReply(
        created=int(time.time()),
        data=[ImageData(b64_json=_text(image.data)) for image in drawing.images],
        output_format=drawing.form.format,
        size=_size_text(drawing),
        usage=_usage(drawing.images),
        serving=None if receipt is None else receipt.body(),
    )


async def _events(drawing: Drawing) -> Events:
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
            yield _event("partial_image", update.partial, common, partial_image_index=num_partial)
            num_partial += 1
        if update.finished is not None:
            receipt = drawing.receipt()
            more = {} if receipt is None else {"serving": receipt.body()}
            data = update.finished.data
            yield _event("completed", data, common, usage=_usage(drawing.images), **more)


def _event(kind: str, data: bytes, common: Mapping[str, Any], **more: Any) -> bytes:
    name = f"image_generation.{kind}"
    return named_event(name, {"type": name, "b64_json": _text(data), **common, **more})


def _usage(images: list[FinishedImage]) -> Usage:
    prompt = sum(image.prompt_tokens for image in images)
    made = sum(image.image_tokens for image in images)
    return Usage(
        input_tokens=prompt,
        output_tokens=made,
        total_tokens=prompt + made,
        input_tokens_details={"text_tokens": prompt, "image_tokens": 0},
    )


def _size_text(drawing: Drawing) -> str:
    return f"{drawing.requests[0].width}x{drawing.requests[0].height}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
