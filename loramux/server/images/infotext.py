"""The texts that PNG files carry: A1111's `parameters`, and the id of the receipt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from loramux import __version__
from loramux.backend.images import ImageCard
from loramux.server.images.names import Chosen
from loramux.server.images.sdapi_words import served_samplers
from loramux.types.image import ImageRequest

PARAMETERS_KEY = "parameters"
RECEIPT_KEY = "loramux-receipt"
_KARRAS, _UNIFORM = "dpmpp_2m_karras", "dpmpp_2m"
_BRACKET = re.compile(r"[\\()\[\]]")


@dataclass(frozen=True, slots=True)
class TypedWords:
    """Prompts in A1111's syntax, as a client sent them."""

    prompt: str
    negative: str


def infotext(
    card: ImageCard, model: str, request: ImageRequest, chosen: Chosen, typed: TypedWords | None
) -> str:
    """Return A1111's description of an image; `typed`: None if no client wrote its syntax."""
    words = typed or _words(request, chosen)
    lines = [words.prompt]
    if words.negative:
        lines.append(f"Negative prompt: {words.negative}")
    lines.append(", ".join(f"{name}: {value}" for name, value in _facts(card, request)))
    lines[-1] += f", Model hash: {model_hash(card)}, Model: {_quoted(model)}"
    if request.source is not None:
        lines[-1] += f", Denoising strength: {request.source.strength:g}"
        if request.source.mask is not None:
            lines[-1] += f", Mask blur: {request.source.mask_blur:g}"
    if chosen:
        weights = ", ".join(f"{one.text}: {one.weight:g}" for one in chosen)
        lines[-1] += f", Lora weights: {_quoted(weights)}"
    lines[-1] += f", Version: loramux {__version__}"
    return "\n".join(lines)


def model_hash(card: ImageCard) -> str:
    return card.digest.rpartition(":")[2][:10]


def _words(request: ImageRequest, chosen: Chosen) -> TypedWords:
    tags = "".join(f" <lora:{one.text}:{one.weight:g}>" for one in chosen)
    texts = (request.prompt, request.negative_prompt)
    # Where brackets are text, A1111 writes them with a backslash.
    positive, negative = (
        one if request.weighs_words else _BRACKET.sub(r"\\\g<0>", one) for one in texts
    )
    return TypedWords(positive + tags, negative)


def _facts(card: ImageCard, request: ImageRequest) -> Iterator[tuple[str, object]]:
    """Yield names and values; the model's own sampler and scale have none."""
    yield "Steps", request.steps
    ours = _UNIFORM if request.sampler == _KARRAS else request.sampler
    name = next((name for name, (one, _) in served_samplers(card).items() if one == ours), None)
    if name is not None:
        yield "Sampler", name
    if ours == _UNIFORM:
        yield "Schedule type", "Karras" if request.sampler == _KARRAS else "Uniform"
    cfg, distilled = request.guidance_scale, None
    if card.takes_true_cfg:
        cfg, distilled = request.true_cfg_scale, request.guidance_scale
    if cfg is not None:
        yield "CFG scale", f"{cfg:g}"
    if distilled is not None:
        yield "Distilled CFG Scale", f"{distilled:g}"
    yield "Seed", request.seed
    yield "Size", f"{request.width}x{request.height}"


def _quoted(value: str) -> str:
    """Return a value as A1111 writes it: in quotes if it could end early."""
    is_plain = not any(sign in value for sign in ',:"\n')
    return value if is_plain else json.dumps(value, ensure_ascii=False)
