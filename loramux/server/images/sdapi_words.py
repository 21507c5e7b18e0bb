"""The words of A1111's API: tags in prompts, samplers and schedulers, and fields not served."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loramux import __version__
from loramux.backend.images import ImageCard
from loramux.errors import InvalidRequest, suggest
from loramux.server.images.names import Chosen
from loramux.types.emphasis import read_emphasis
from loramux.types.image import ImageRequest

_TAG = re.compile(r"<(\w+):([^<>]*)>")
_LORA_TAGS = ("lora", "lyco")


@dataclass(frozen=True, slots=True)
class TaggedPrompt:
    text: str
    """The prompt without its tags."""
    names: tuple[str, ...]
    weights: tuple[float | None, ...]
    """None: the tag has no weight."""


def read_prompt(prompt: str) -> TaggedPrompt:
    """Take `<lora:name:weight>` out of a prompt; refuse other syntax that changes a picture."""
    names: list[str] = []
    weights: list[float | None] = []
    for tag in _TAG.finditer(prompt):
        if tag[1] not in _LORA_TAGS:
            raise InvalidRequest(
                f"{tag[0]!r} is not supported: tags are <lora:name:weight>.", param="prompt"
            )
        name, *values = tag[2].split(":")
        names.append(name)
        weights.append(_weight(tag[0], values))
    return TaggedPrompt(_TAG.sub("", prompt).strip(), tuple(names), tuple(weights))


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of a drawing as its model reads them."""

    positive: str
    negative: str
    are_weighed: bool
    """Whether brackets weigh words; they are plain text otherwise."""


def read_words(card: ImageCard, prompt: TaggedPrompt, negative: str) -> Words:
    """Check the syntax of both prompts; raise InvalidRequest for what would be drawn as words."""
    if read_prompt(negative).names:
        raise InvalidRequest(
            "Adapters are named in prompt, where they change the whole image.",
            param="negative_prompt",
        )
    texts = {"prompt": prompt.text, "negative_prompt": negative}
    read = {
        param: read_emphasis(text, weighs_words=card.weighs_words, param=param)
        for param, text in texts.items()
    }
    if any(one.weight != 1 for fragments in read.values() for one in fragments):
        return Words(prompt.text, negative, are_weighed=True)
    positive, plain = ("".join(one.text for one in read[param]) for param in texts)
    return Words(positive, plain, are_weighed=False)


def _weight(tag: str, values: list[str]) -> float | None:
    """Return the weight of a tag; those of text encoder and denoiser must be equal."""
    if not values:
        return None
    try:
        weights = {float(value.removeprefix("te=").removeprefix("unet=")) for value in values}
    except ValueError:
        weights = {math.nan}
    (weight, *others) = weights
    if others or not math.isfinite(weight):
        raise InvalidRequest(
            f"{tag[:100]!r} must have one weight, such as <lora:name:0.8>.", param="prompt"
        )
    return weight


# Name of A1111 -> our sampler, and other names of it.
SAMPLERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Euler": ("euler", ("k_euler",)),
    "Euler a": ("euler_a", ("k_euler_a", "k_euler_ancestral")),
    "Heun": ("heun", ("k_heun",)),
    "DPM++ 2M": ("dpmpp_2m", ("k_dpmpp_2m",)),
    "DPM++ 2M SDE": ("dpmpp_2m_sde", ("k_dpmpp_2m_sde",)),
    "DDIM": ("ddim", ()),
    "DDPM": ("ddpm", ()),
    "UniPC": ("unipc", ()),
    "LCM": ("lcm", ("k_lcm",)),
}
SCHEDULERS: Mapping[str, str] = {
    "automatic": "Automatic",
    "uniform": "Uniform",
    "karras": "Karras",
}
_FLOW = "Euler"
"""The name of the only sampler of models with flow matching."""


def served_samplers(card: ImageCard) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the samplers of the model by A1111's names."""
    if not card.samplers:
        return {_FLOW: ("", SAMPLERS[_FLOW][1])}
    return {name: one for name, one in SAMPLERS.items() if one[0] in card.samplers}


def find_sampler(card: ImageCard, name: str | None, scheduler: str | None) -> str:
    """Return our name of a sampler with a scheduler; none is the model's own."""
    if not name:
        return ""
    wanted, schedule = name.strip(), (scheduler or "automatic").lower()
    if wanted.lower().endswith(" karras"):
        wanted, schedule = wanted[: -len(" karras")], "karras"
    served = served_samplers(card)
    words = {word.lower(): ours for key, (ours, more) in served.items() for word in (key, *more)}
    ours = words.get(wanted.lower())
    if ours is None:
        raise InvalidRequest(
            f"This model has no sampler {name[:100]!r}. {suggest(name[:100], list(served))}",
            param="sampler_name",
        )
    if schedule not in SCHEDULERS:
        raise InvalidRequest(
            f"There is no scheduler {schedule[:100]!r}. {suggest(schedule, list(SCHEDULERS))}",
            param="scheduler",
        )
    # The scheduler that A1111 has for this sampler.
    if ours == "dpmpp_2m" and schedule != "uniform":
        return "dpmpp_2m_karras"
    if schedule == "karras":
        raise InvalidRequest(
            "The scheduler karras is served with the sampler DPM++ 2M alone.", param="scheduler"
        )
    return ours


class _Any:
    """Equal to every value."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY = (_Any(),)
_OFF = (False, 0)
_ZERO = (0,)
_NOTHING: tuple[Any, ...] = ("", [], {}, "None")
_NO_SEED_SIZE = (0, -1)


def _each(names: str, values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), values)


HARMLESS_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **_each("enable_hr restore_faces tiling save_images disable_extra_networks", _OFF),
    **_each("subseed_strength s_churn s_min_uncond", _ZERO),
    **_each("seed_resize_from_h seed_resize_from_w", _NO_SEED_SIZE),
    **_each("firstphase_width firstphase_height resize_mode s_tmin", _ZERO),
    **_each("s_noise initial_noise_multiplier", (1,)),
    "s_tmax": (0, math.inf),
    **_each("styles script_name script_args refiner_checkpoint infotext", _NOTHING),
    **_each("firstpass_image latent_mask", _NOTHING),
    # Without an effect here or there.
    **_each("subseed do_not_save_samples do_not_save_grid comments force_task_id", _ANY),
    **_each("override_settings_restore_afterwards include_init_images", _ANY),
    **_each("image_cfg_scale refiner_switch_at inpaint_full_res_padding", _ANY),
    **_each("hr_scale hr_upscaler hr_second_pass_steps hr_resize_x hr_resize_y", _ANY),
    **_each("hr_checkpoint_name hr_sampler_name hr_scheduler hr_prompt hr_negative_prompt", _ANY),
    "hr_cfg": _ANY,
}
"""Fields of A1111 that are not served, with the values that change nothing."""
MASK_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "inpaint_full_res": _OFF,
    "inpainting_fill": (1,),
}
"""Fields that change a picture with a mask only: the whole source is drawn from its own pixels."""


def check_fields(given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuses the first field that would change the picture, and fields that nothing knows."""
    table = dict(HARMLESS_FIELDS)
    table |= MASK_FIELDS if given.get("mask") else dict.fromkeys(MASK_FIELDS, _ANY)
    for name, value in given.items():
        if name in known or value is None:
            continue
        if name not in table:
            raise InvalidRequest(
                f"{name[:100]} is not known here, and might change the picture: leave it out.",
                param=name[:100],
            )
        if value not in table[name]:
            raise InvalidRequest(
                f"{name} is not supported: send {_shown(table[name])} or leave it out.", param=name
            )


def check_scripts(scripts: Mapping[str, Any]) -> None:
    """Refuses scripts that are switched on; clients send others with [] or [false]."""
    for name, script in scripts.items():
        args = script.get("args") if isinstance(script, Mapping) else script
        if args not in ([], {}, None, [False]):
            raise InvalidRequest(
                f"The script {name[:100]!r} is not supported: leave it out.",
                param="alwayson_scripts",
            )


def _shown(values: tuple[Any, ...]) -> str:
    return str(values[0]).lower() or '""'


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
