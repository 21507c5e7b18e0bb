"""POST /v1/images/edits in the form of OpenAI: drawings that begin with an image."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.http.body import convert, decode, read_body, read_upload
from loramux.server.http.call import Call
from loramux.server.http.multipart import MULTIPART, Form, media_type, parse_form
from loramux.server.http.openapi import uploading
from loramux.server.http.routes import Route, Routes
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import image_draft
from loramux.server.images.near_misses import check_names, names_in
from loramux.server.images.openai import answer, make_drawing
from loramux.server.images.sources import check_files, decode_base64
from loramux.types.image import DEFAULT_STRENGTH, SourceImage
from loramux.wire.images import ImageEdit, ImagesReply, JsonImageEdit

_LISTS = ("adapters", "adapter_weights")
# Objects, which forms have as JSON.
_OBJECTS = ("lora", "loras", "image_loras")


def edit_routes(context: ImageContext) -> list[Route]:
    routes = Routes("images")

    @routes.post("/v1/images/edits", uploading(JsonImageEdit, ImagesReply, "image", "mask"))
    async def edit(request: Call) -> Response:
        """Draws images that begin with one of the client's, as a form or with base64 in JSON.

        With a mask, its transparent pixels are drawn anew, or its white ones if it has no alpha
        channel. With `stream`, the answer has server-sent events.
        """
        context.require_ready()
        with image_draft(context, request) as draft:
            body, source = await _read(request, context.max_body_bytes)
            drawing = await make_drawing(context, body, request, draft, source)
            return await answer(request, drawing, body, "image_edit")

    return routes.found


async def _read(request: Call, max_bytes: int) -> tuple[ImageEdit, SourceImage]:
    content_type = request.headers.get("content-type", "")
    if media_type(content_type) == "application/json":
        raw = await read_body(request, max_bytes)
        sent = decode(raw, JsonImageEdit)
        check_names(names_in(raw), JsonImageEdit)
        body: ImageEdit = sent
        given = [sent.image] if isinstance(sent.image, str) else sent.image
        images = [decode_base64(text, "image") for text in given]
        mask = None if sent.mask is None else decode_base64(sent.mask, "mask")
    else:
        form = parse_form(await read_upload(request, max_bytes), content_type)
        fields = _fields(form)
        body = convert(fields, ImageEdit, from_text=True)
        check_names((*fields, *(name.removesuffix("[]") for name in form.files)), JsonImageEdit)
        images = [*form.files.get("image", ()), *form.files.get("image[]", ())]
        mask = _mask(form)
    if body.input_fidelity not in (None, "low"):
        raise InvalidRequest(
            "input_fidelity must be low here: send strength.", param="input_fidelity"
        )
    source = SourceImage(
        image=_only(images),
        mask=mask,
        strength=DEFAULT_STRENGTH if body.strength is None else body.strength,
        masked_by="transparency",
        mask_blur=body.mask_blur,
    )
    return body, check_files(source)


def _only(images: list[bytes]) -> bytes:
    if not images:
        raise InvalidRequest(f"Send the image as a file of the {MULTIPART} body.", param="image")
    if len(images) > 1:
        raise InvalidRequest(
            f"One image is edited at a time, got {len(images)}.",
            param="image",
        )
    return images[0]


def _mask(form: Form) -> bytes | None:
    masks = form.files.get("mask", [])
    if len(masks) > 1:
        raise InvalidRequest(f"An image has one mask, got {len(masks)}.", param="mask")
    return masks[0] if masks else None


def _fields(form: Form) -> dict[str, Any]:
    """Return the fields that are not files; list have a name with or without brackets."""
    fields: dict[str, Any] = {}
    for name, texts in form.texts.items():
        bare = name.removesuffix("[]")
        if bare in _LISTS:
            fields.setdefault(bare, []).extend(_items(bare, texts))
        elif bare in ("image", "mask"):
            raise InvalidRequest(f"{bare} must be a file, with a file name.", param=bare)
        elif len(texts) > 1:
            raise InvalidRequest(f"The field {bare[:100]} comes {len(texts)} times.", param=bare)
        elif bare.partition("[")[0] in _OBJECTS:
            fields[bare] = _json(bare, texts[0])
        else:
            fields[bare] = texts[0]
    return fields


def _items(name: str, texts: list[str]) -> list[Any]:
    """Return the items of a list; one text may be all of them as JSON, or empty for none."""
    if len(texts) == 1 and not texts[0].strip():
        return []
    if len(texts) == 1 and texts[0].lstrip().startswith("["):
        found = _json(name, texts[0])
        return list(found) if isinstance(found, list) else [found]
    return texts


def _json(name: str, text: str) -> Any:
    if "[" in name:
        raise InvalidRequest(
            f"Send {name.partition('[')[0]} as one field with JSON, or adapters[].", param=name
        )
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}.", param=name) from error
