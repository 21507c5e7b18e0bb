"""POST /v1/images/generations and /v1/images/edits, in OpenAI's format."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Any

import msgspec
from starlette.responses import Response

from loramux.backend.images import FinishedImage, ImageForm
from loramux.config.images import parse_size
from loramux.errors import InvalidRequest
from loramux.server.errors import BodyTooLarge, NotJson
from loramux.server.http.body import convert, decode, json_response, read_body, read_upload
from loramux.server.http.call import Call
from loramux.server.http.openapi import generating, uploading
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import Events, named_event, stream_events, until_gone
from loramux.server.images.choice import choose
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import Drawing, ImageDraft, image_draft
from loramux.server.images.fields import (
    check_files,
    check_names,
    decode_base64,
    named_adapters,
    names_in,
    size_of,
)
from loramux.server.images.names import selection_of
from loramux.types.image import DEFAULT_STRENGTH, ImageRequest, SourceImage
from loramux.wire.images import (
    ImageData,
    ImageEdit,
    ImageGeneration,
    ImagesReply,
    ImageUsage,
    JsonImageEdit,
)

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


MULTIPART = "multipart/form-data"
MAX_PARTS = 64
MAX_HEADER_BYTES = 4096
MAX_TEXT_BYTES = 2**18
"""Limit of one field that is not a file."""
_LINE = b"\r\n"


@dataclass(slots=True)
class Form:
    """Fields in the order of the body; a name may come several times."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def parse_form(body: bytes, content_type: str) -> Form:
    """Raise InvalidRequest, BodyTooLarge, or NotJson for another type."""
    if media_type(content_type) != MULTIPART:
        raise NotJson(
            f"Send the files as {MULTIPART}, or as base64 in JSON, not '{content_type[:200]}'."
        )
    form = Form()
    for part in _parts(body, boundary_of(content_type)):
        name, is_file, content = _content(part)
        if is_file:
            form.files.setdefault(name, []).append(content)
        else:
            form.texts.setdefault(name, []).append(_text_of_field(name, content))
    return form


def boundary_of(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= 200 or not boundary.isascii():
        raise InvalidRequest("The header Content-Type of the form has no valid boundary.")
    return b"--" + boundary.encode()


def _parts(body: bytes, boundary: bytes) -> list[bytes]:
    # The first boundary has no line before it.
    pieces = (_LINE + body).split(_LINE + boundary, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        raise BodyTooLarge(f"The form has more than {MAX_PARTS} parts.")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):  # noqa: PLR2004  (preamble and end)
        raise InvalidRequest("The form is incomplete: its last boundary is missing.")
    return pieces[1:-1]


def _content(part: bytes) -> tuple[str, bool, bytes]:
    """Return the name of a part, whether it is a file, and its content."""
    head, end, content = part.removeprefix(_LINE).partition(_LINE + _LINE)
    if not end or len(head) > MAX_HEADER_BYTES:
        raise InvalidRequest("A part of the form has no headers, or too long ones.")
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name = header.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise InvalidRequest("A part of the form has no name.")
    is_file = header.get_param("filename", header="content-disposition") is not None
    return name, is_file, content


def _text_of_field(name: str, content: bytes) -> str:
    if len(content) > MAX_TEXT_BYTES:
        raise BodyTooLarge(f"The field {name[:100]!r} has more than {MAX_TEXT_BYTES} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The field {name[:100]!r} is not valid UTF-8.") from error


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
