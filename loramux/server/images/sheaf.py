"""sheaf's routes: POST /{name}/predict and /{name}/stream, GET /{name}/health and /{name}/ready."""

from __future__ import annotations

import base64
import secrets
import uuid
from typing import Any

from msgspec import msgpack
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loramux.backend.host import Health
from loramux.backend.images import FinishedImage, ImageForm
from loramux.errors import InvalidRequest
from loramux.server.errors import error_info, shaped_response
from loramux.server.http.body import decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import Events, StreamForm, event, stream_events, until_gone
from loramux.server.images.choice import choose_deployed
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import Drawing, ImageDraft, image_draft
from loramux.server.images.fields import (
    check_adapter_names,
    check_files,
    decode_base64,
    names_in,
    size_of,
)
from loramux.server.images.names import selection_of
from loramux.server.images.openai import MAX_RANDOM_SEED
from loramux.types.image import ImageRequest, SourceImage
from loramux.wire.images import SheafEdit, SheafPredict, SheafReply

SheafBody = SheafPredict | SheafEdit
UNPROCESSABLE = 422


def sheaf_error(error: Exception) -> Response:
    """Return an error in the form of FastAPI; a field that is invalid is a 422 here."""
    info = error_info(error)
    body: object = {"detail": info.message}
    status = info.code
    if isinstance(error, InvalidRequest):
        status = UNPROCESSABLE
        place = ["body", *([error.param] if error.param else [])]
        body = {"detail": [{"type": "value_error", "loc": place, "msg": info.message}]}
    return shaped_response(error, body, status)


def sheaf_routes(context: ImageContext) -> list[Route]:
    routes = Routes("sheaf", shape=sheaf_error)

    def deployment(request: Call) -> str:
        name: str = request.path_params["name"]
        if name not in context.names.base_names:
            raise HTTPException(404, f"No deployment named '{name}'")
        return name

    @routes.get("/{name}/health")
    async def health(request: Call) -> Response:
        return json_response({"status": "ok", "model": deployment(request)})

    @routes.get("/{name}/ready")
    async def ready(request: Call) -> Response:
        name = deployment(request)
        if context.backend.health is not Health.READY:
            raise HTTPException(503, "not ready")
        return json_response({"status": "ready", "model": name})

    @routes.post("/{name}/predict")
    async def predict(request: Call) -> Response:
        name = deployment(request)
        with image_draft(context, request) as draft:
            body, drawing = await _read(context, name, request, draft)
            (image,) = await until_gone(request, drawing.draw())
            return json_response(_reply(body, drawing, image))

    @routes.post("/{name}/stream")
    async def stream(request: Call) -> Response:
        name = deployment(request)
        with image_draft(context, request) as draft:
            body, drawing = await _read(context, name, request, draft)
            return await stream_events(request, _events(body, drawing), _STREAM)

    return routes.found


def _error_event(error: Exception) -> bytes:
    return event({"type": "error", "error": error_info(error).message})


_STREAM = StreamForm(on_error=_error_event)


async def _read(
    context: ImageContext, name: str, request: Call, draft: ImageDraft
) -> tuple[SheafBody, Drawing]:
    context.require_ready()
    caller = request.caller
    kind: Any = SheafBody
    raw = await read_body(request, context.max_body_bytes)
    body: SheafBody = decode(raw, kind)
    check_adapter_names(names_in(raw), type(body))
    if body.adapter_weights is not None and not body.adapters:
        raise InvalidRequest(
            "adapter_weights provided but adapters is empty", param="adapter_weights"
        )
    body.request_id = _request_id(body)
    draft.asked = "+".join(body.adapters) or body.model_name
    chosen = await choose_deployed(context, caller, name, body.adapters, body.adapter_weights)
    scale = body.guidance_scale
    takes_guidance = context.backend.card.takes_guidance
    source = None
    if isinstance(body, SheafEdit):
        source = check_files(_source(body))
        width, height = size_of(context.backend.card, source)
    else:
        default = context.backend.card.default_size
        width, height = body.width or default, body.height or default
    image = ImageRequest(
        request_id=f"img-{secrets.token_hex(12)}",
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        width=width,
        height=height,
        steps=body.num_inference_steps,
        seed=secrets.randbelow(MAX_RANDOM_SEED) if body.seed is None else body.seed,
        guidance_scale=scale if takes_guidance else None,
        true_cfg_scale=None if takes_guidance else scale,
        source=source,
        selection=selection_of(chosen),
        tenant=caller.tenant,
    )
    drawing = Drawing(
        context=context,
        caller=caller,
        requests=[image],
        chosen=chosen,
        form=ImageForm(),
        http=request,
        draft=draft,
    )
    return body, drawing


def _source(body: SheafEdit) -> SourceImage:
    return SourceImage(
        image=decode_base64(body.image_b64, "image_b64"),
        mask=None if body.mask_b64 is None else decode_base64(body.mask_b64, "mask_b64"),
        strength=body.strength,
    )


def _request_id(body: SheafBody) -> str:
    if body.request_id is None:
        return str(uuid.uuid4())
    try:
        return str(uuid.UUID(body.request_id))
    except ValueError as error:
        raise InvalidRequest("request_id must be a UUID.", param="request_id") from error


def _reply(body: SheafBody, drawing: Drawing, image: FinishedImage) -> SheafReply:
    receipt = drawing.receipt()
    (request,) = drawing.requests
    assert body.request_id is not None
    metadata: dict[str, Any] = {} if receipt is None else {"serving": receipt.body()}
    if drawing.warnings:
        metadata["warnings"] = drawing.warnings
    return SheafReply(
        request_id=body.request_id,
        model_type=str(body.__struct_config__.tag),
        model_name=body.model_name,
        metadata=metadata,
        image_b64=base64.b64encode(image.data).decode(),
        height=request.height,
        width=request.width,
        seed=request.seed,
    )


async def _events(body: SheafBody, drawing: Drawing) -> Events:
    async for update in drawing.updates():
        if update.finished is None:
            yield event(
                {
                    "type": "progress",
                    "step": update.step,
                    "total_steps": update.num_steps,
                    "done": False,
                }
            )
            continue
        reply = msgpack.decode(msgpack.encode(_reply(body, drawing, update.finished)))
        yield event({"type": "result", "done": True, **reply})
