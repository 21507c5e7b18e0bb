"""A1111's routes below /sdapi/v1: txt2img, img2img, and what clients ask for beside them."""

from __future__ import annotations

import base64
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from loramux import __version__
from loramux.backend.images import ImageCard, ImageForm, ImageUpdate
from loramux.errors import InvalidRequest
from loramux.server.errors import error_info, shaped_response
from loramux.server.http.body import convert, decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import until_gone
from loramux.server.images.choice import choose
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import Drawing, ImageDraft, image_draft
from loramux.server.images.fields import check_files, decode_base64
from loramux.server.images.names import selection_of
from loramux.server.images.openai import MAX_RANDOM_SEED
from loramux.server.images.sdapi_words import (
    SCHEDULERS,
    TaggedPrompt,
    TypedWords,
    check_fields,
    check_scripts,
    find_sampler,
    model_hash,
    read_prompt,
    read_words,
    served_samplers,
)
from loramux.server.live.lists import list_models
from loramux.types.caller import Caller
from loramux.types.image import ImageRequest, SourceImage
from loramux.wire.images import (
    MAX_IMAGES,
    SdDrawing,
    SdImages,
    SdLora,
    SdModel,
    SdProgress,
    SdProgressState,
    SdSampler,
    SdScheduler,
)

DEFAULT_STEPS = 50
DEFAULT_CFG_SCALE = 7.0
DEFAULT_STRENGTH = 0.75
DEFAULT_MASK_BLUR = 4.0
# The only sampler whose eta is 0 by default, and 1 where it is that of others.
_DETERMINISTIC = "ddim"


@dataclass(frozen=True, slots=True)
class SdAsked:
    """The drawing of a body, with what its info says."""

    drawing: Drawing
    prompt: TaggedPrompt
    negative_prompt: str


async def make_drawing(
    context: ImageContext, body: SdDrawing, http: Call, draft: ImageDraft
) -> SdAsked:
    """Check a body and make the requests of its images; their seeds follow one another."""
    caller, card = http.caller, context.backend.card
    check_scripts(body.alwayson_scripts or {})
    prompt = read_prompt(body.prompt)
    words = read_words(card, prompt, body.negative_prompt or "")
    draft.asked = "+".join(prompt.names) or None
    sampler = find_sampler(card, body.sampler_name or body.sampler_index, body.scheduler)
    _check_eta(body.eta, sampler)
    weights = [
        context.names.weight_of(name) if weight is None else weight
        for name, weight in zip(prompt.names, prompt.weights, strict=True)
    ]
    # Without a tag, the default of the server.
    named = (list(prompt.names), weights) if prompt.names else (None, None)
    chosen = await choose(context, caller, None, *named)
    guidance, true_cfg = _guidance(card, body)
    seed = body.seed
    if seed is None or seed == -1:
        seed = secrets.randbelow(MAX_RANDOM_SEED)
    source = _source(body)
    requests = [
        ImageRequest(
            request_id=f"img-{secrets.token_hex(12)}",
            prompt=words.positive,
            negative_prompt=words.negative,
            weighs_words=words.are_weighed,
            width=card.default_size if body.width is None else body.width,
            height=card.default_size if body.height is None else body.height,
            steps=DEFAULT_STEPS if body.steps is None else body.steps,
            seed=seed + index,
            guidance_scale=guidance,
            true_cfg_scale=true_cfg,
            sampler=sampler,
            source=source,
            selection=selection_of(chosen),
            tenant=caller.tenant,
        )
        for index in range(_count(body))
    ]
    drawing = Drawing(
        context=context,
        caller=caller,
        requests=requests,
        chosen=chosen,
        form=ImageForm(),
        http=http,
        draft=draft,
        typed=TypedWords(body.prompt, body.negative_prompt or ""),
    )
    return SdAsked(drawing, prompt, body.negative_prompt or "")


def _count(body: SdDrawing) -> int:
    count = (body.batch_size or 1) * (body.n_iter or 1)
    if count > MAX_IMAGES:
        raise InvalidRequest(
            f"batch_size times n_iter is at most {MAX_IMAGES}, got {count}.", param="batch_size"
        )
    return count


def _guidance(card: ImageCard, body: SdDrawing) -> tuple[float | None, float | None]:
    """Return guidance_scale and true_cfg_scale; cfg_scale is classifier-free guidance."""
    scale = DEFAULT_CFG_SCALE if body.cfg_scale is None else body.cfg_scale
    if not card.takes_true_cfg:
        return scale, None
    return (body.distilled_cfg_scale if card.takes_guidance else None), scale


def _check_eta(eta: float | None, sampler: str) -> None:
    wanted = 0.0 if sampler == _DETERMINISTIC else 1.0
    if eta is not None and eta != wanted:
        raise InvalidRequest(f"eta must be {wanted:g} with this sampler, got {eta:g}.", param="eta")


def _source(body: SdDrawing) -> SourceImage | None:
    if not body.init_images:
        return None
    if len(body.init_images) > 1:
        raise InvalidRequest(
            f"One image is drawn from at a time, got {len(body.init_images)}.",
            param="init_images",
        )
    blur = body.mask_blur
    for name in ("mask_blur_x", "mask_blur_y"):
        value = getattr(body, name)
        if value is not None and value != (DEFAULT_MASK_BLUR if blur is None else blur):
            raise InvalidRequest(f"{name} is not supported: send mask_blur.", param=name)
    return check_files(
        SourceImage(
            image=decode_base64(body.init_images[0], "init_images"),
            mask=decode_base64(body.mask, "mask") if body.mask else None,
            strength=DEFAULT_STRENGTH
            if body.denoising_strength is None
            else body.denoising_strength,
            masked_by="black" if body.inpainting_mask_invert else "white",
            mask_blur=DEFAULT_MASK_BLUR if blur is None else blur,
        )
    )


def info_of(context: ImageContext, body: SdDrawing, asked: SdAsked) -> dict[str, Any]:
    """Return what A1111 says of images: enough to draw them again."""
    requests = asked.drawing.requests
    first, seeds = requests[0], [one.seed for one in requests]
    model = context.names.base_names[0]
    sampler = body.sampler_name or body.sampler_index or "Euler"
    scale = DEFAULT_CFG_SCALE if body.cfg_scale is None else body.cfg_scale
    negative = asked.negative_prompt
    receipt = asked.drawing.receipt()
    return {
        "prompt": body.prompt,
        "all_prompts": [body.prompt] * len(seeds),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(seeds),
        "seed": seeds[0],
        "all_seeds": seeds,
        "subseed": seeds[0],
        "all_subseeds": seeds,
        "subseed_strength": 0,
        "width": first.width,
        "height": first.height,
        "sampler_name": sampler,
        "cfg_scale": scale,
        "steps": first.steps,
        "batch_size": body.batch_size or 1,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": model,
        "sd_model_hash": model_hash(context.backend.card),
        "seed_resize_from_w": -1,
        "seed_resize_from_h": -1,
        "denoising_strength": None if first.source is None else first.source.strength,
        "extra_generation_params": {
            "Lora weights": {one.text: one.weight for one in asked.drawing.chosen}
        },
        "index_of_first_image": 0,
        "infotexts": [asked.drawing.infotext(one) for one in requests],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.gmtime()),
        "clip_skip": 1,
        "is_using_inpainting_conditioning": False,
        "version": f"loramux {__version__}",
        **({} if receipt is None else {"serving": receipt.body()}),
        **({"warnings": asked.drawing.warnings} if asked.drawing.warnings else {}),
    }


@dataclass(slots=True, eq=False)
class _Shown:
    """The steps of one request."""

    tenant: str
    num_images: int
    num_steps: int
    began_s: float = field(default_factory=time.monotonic)
    steps: int = 0
    finished: int = 0

    def note(self, update: ImageUpdate) -> None:
        if update.finished is not None:
            self.finished += 1
        else:
            self.steps += 1
            self.num_steps = update.num_steps


class SdProgressBoard:
    """The progress of the requests that run now, each seen by its tenant."""

    def __init__(self) -> None:
        self._shown: list[_Shown] = []

    @contextmanager
    def showing(self, drawing: Drawing) -> Iterator[None]:
        shown = _Shown(
            drawing.caller.tenant, len(drawing.requests), max(1, drawing.requests[0].steps)
        )
        drawing.on_update = shown.note
        self._shown.append(shown)
        try:
            yield
        finally:
            self._shown.remove(shown)

    def progress(self, caller: Caller) -> SdProgress:
        """Return the progress of the oldest request; clients expect one at a time."""
        mine = [one for one in self._shown if caller.is_operator or one.tenant == caller.tenant]
        if not mine:
            return SdProgress(progress=0.0, eta_relative=0.0, state=SdProgressState())
        first = mine[0]
        done = min(first.steps / (first.num_steps * first.num_images), 1.0)
        elapsed_s = time.monotonic() - first.began_s
        return SdProgress(
            progress=done,
            eta_relative=elapsed_s / done - elapsed_s if done else 0.0,
            state=SdProgressState(
                job="scripts_txt2img",
                job_count=sum(one.num_images for one in mine),
                job_timestamp=time.strftime("%Y%m%d%H%M%S", time.gmtime()),
                job_no=first.finished,
                sampling_step=min(first.steps // first.num_images, first.num_steps),
                sampling_steps=first.num_steps,
            ),
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
