"""The drawings of A1111's API: requests of its bodies, its info and its progress."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loramux import __version__
from loramux.backend.images import ImageCard, ImageForm, ImageUpdate
from loramux.errors import InvalidRequest
from loramux.server.http.call import Call
from loramux.server.images.choice import choose
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import Drawing, ImageDraft
from loramux.server.images.infotext import TypedWords, model_hash
from loramux.server.images.names import selection_of
from loramux.server.images.openai import MAX_RANDOM_SEED
from loramux.server.images.sdapi_words import (
    TaggedPrompt,
    check_scripts,
    find_sampler,
    read_prompt,
    read_words,
)
from loramux.server.images.sources import check_files, decode_base64
from loramux.types.caller import Caller
from loramux.types.image import ImageRequest, SourceImage
from loramux.wire.images import MAX_IMAGES, SdDrawing, SdProgress, SdProgressState

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
