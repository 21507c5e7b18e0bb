"""A1111's routes below /sdapi/v1: txt2img, img2img, and what clients ask for beside them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.errors import error_info, shaped_response
from loramux.server.http.body import convert, decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import until_gone
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import image_draft
from loramux.server.images.sdapi_drawing import SdProgressBoard, info_of, make_drawing
from loramux.server.images.sdapi_words import SCHEDULERS, check_fields, served_samplers
from loramux.server.live.model_list import list_models
from loramux.wire.images import (
    SdDrawing,
    SdImages,
    SdLora,
    SdModel,
    SdSampler,
    SdScheduler,
)

UNPROCESSABLE = 422
_KNOWN = frozenset(SdDrawing.__struct_fields__)
_FROM_TEXT = _KNOWN - {"init_images", "mask"}
# Settings that change nothing here.
_HARMLESS_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "CLIP_stop_at_last_layers": (1,),
    "sd_vae": ("Automatic", "None"),
    "sd_lora": ("None", ""),
    "eta_noise_seed_delta": (0,),
}
_HASH_LENGTH = 10


def sdapi_error(error: Exception) -> Response:
    """Return an error in the form of A1111; a field that is invalid is a 422 here."""
    info = error_info(error)
    status = UNPROCESSABLE if isinstance(error, InvalidRequest) else info.code
    body = {"error": info.type, "detail": info.message, "body": "", "errors": info.message}
    return shaped_response(error, body, status)


def sdapi_routes(context: ImageContext) -> list[Route]:
    routes = Routes("A1111", prefix="/sdapi/v1", shape=sdapi_error)
    board = SdProgressBoard()

    async def draw(request: Call, *, from_image: bool) -> Response:
        context.require_ready()
        with image_draft(context, request) as draft:
            body, given = await _read(context, request, from_image=from_image)
            asked = await make_drawing(context, body, request, draft)
            with board.showing(asked.drawing):
                images = await until_gone(request, asked.drawing.draw())
            kept = body.send_images is None or body.send_images
            reply = SdImages(
                images=[base64.b64encode(one.data).decode() for one in images] if kept else [],
                parameters={**given, "init_images": None, "mask": None} if from_image else given,
                info=msgspec.json.encode(info_of(context, body, asked)).decode(),
            )
            return json_response(reply)

    @routes.post("/txt2img")
    async def txt2img(request: Call) -> Response:
        """Draws images; `<lora:name:weight>` in the prompt names adapters."""
        return await draw(request, from_image=False)

    @routes.post("/img2img")
    async def img2img(request: Call) -> Response:
        """Draws images that begin with `init_images`; the white part of `mask` is drawn anew."""
        return await draw(request, from_image=True)

    @routes.get("/progress")
    async def progress(request: Call) -> Response:
        """How far the images of the caller are that these routes draw now."""
        return json_response(board.progress(request.caller))

    _add_lists(routes, context)
    _add_samplers(routes, context)
    _add_options(routes, context)
    return routes.found


def _add_lists(routes: Routes, context: ImageContext) -> None:
    @routes.get("/loras")
    async def loras(request: Call) -> Response:
        entries = await list_models(context, request.caller)
        found = [
            SdLora(
                name=one.id,
                alias=one.id,
                path=one.id if one.cid is UNSET else one.cid,
                metadata={
                    "ss_network_dim": None if one.rank is UNSET else one.rank,
                    "trigger_words": [] if one.trigger_words is UNSET else one.trigger_words,
                },
            )
            for one in entries
            if one.parent is not None and one.modality == "image"
        ]
        return json_response(found)

    @routes.get("/sd-models")
    async def sd_models(request: Call) -> Response:
        context.require_ready()
        digest = _digest(context)
        return json_response(
            [
                SdModel(
                    title=_title(context, name),
                    model_name=name,
                    hash=digest[:_HASH_LENGTH],
                    sha256=digest,
                    filename=name,
                )
                for name in context.names.base_names
            ]
        )


def _add_samplers(routes: Routes, context: ImageContext) -> None:
    @routes.get("/samplers")
    async def samplers(request: Call) -> Response:
        context.require_ready()
        served = served_samplers(context.backend.card)
        return json_response(
            [
                SdSampler(name=name, aliases=list(more), options={})
                for name, (_, more) in served.items()
            ]
        )

    @routes.get("/schedulers")
    async def schedulers(request: Call) -> Response:
        context.require_ready()
        has_karras = "dpmpp_2m_karras" in context.backend.card.samplers
        return json_response(
            [
                SdScheduler(name=name, label=label)
                for name, label in SCHEDULERS.items()
                if has_karras or name != "karras"
            ]
        )


def _add_options(routes: Routes, context: ImageContext) -> None:
    @routes.get("/options")
    async def options(request: Call) -> Response:
        context.require_ready()
        return json_response(
            {
                "sd_model_checkpoint": _title(context, context.names.base_names[0]),
                "sd_checkpoint_hash": _digest(context),
                "sd_lora": context.names.default or "None",
                "sd_vae": "Automatic",
                "CLIP_stop_at_last_layers": 1,
                "samples_format": "png",
            }
        )

    @routes.post("/options")
    async def set_options(request: Call) -> Response:
        """Accept settings that are in force already, and changes nothing."""
        context.require_ready()
        raw = await read_body(request, context.max_body_bytes)
        check_settings(context, decode(raw, dict[str, Any]))
        return json_response(None)


def check_settings(context: ImageContext, settings: Mapping[str, Any]) -> None:
    """Refuses settings that are not in force: no request changes the server for others."""
    bases = context.names.base_names
    for name, value in settings.items():
        if name == "sd_model_checkpoint":
            known = [*bases, *(_title(context, base) for base in bases)]
            if value not in known:
                raise InvalidRequest(
                    f"The model {str(value)[:200]!r} is not served. Served are {', '.join(bases)}.",
                    param=name,
                )
        elif value not in _HARMLESS_SETTINGS.get(name, ()):
            raise InvalidRequest(
                f"The setting {name[:100]} cannot be changed to this value by a request.",
                param=name[:100],
            )


async def _read(
    context: ImageContext, request: Call, *, from_image: bool
) -> tuple[SdDrawing, dict[str, Any]]:
    given = decode(await read_body(request, context.max_body_bytes), dict[str, Any])
    check_fields(given, _KNOWN if from_image else _FROM_TEXT | {"denoising_strength"})
    body = convert(given, SdDrawing)
    if from_image and not body.init_images:
        raise InvalidRequest("Send the image in init_images.", param="init_images")
    check_settings(context, body.override_settings or {})
    return body, {name: _sendable(value) for name, value in given.items()}


def _sendable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _title(context: ImageContext, name: str) -> str:
    return f"{name} [{_digest(context)[:_HASH_LENGTH]}]"


def _digest(context: ImageContext) -> str:
    return context.backend.card.digest.rpartition(":")[2]
