"""The fields of images: adapters, sizes, files, and names that were nearly meant."""

from __future__ import annotations

import binascii
import difflib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from loramux.backend.images import ImageCard
from loramux.errors import InvalidRequest
from loramux.server.http.body import decode
from loramux.types.image import SourceImage
from loramux.types.image_files import measure
from loramux.wire.images import ImageGeneration, NamedLora

_DATA_URL = "data:"


def decode_base64(text: str, param: str) -> bytes:
    """Decode base64 or a data URL with base64."""
    if text.startswith(_DATA_URL):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(f"{param} must be a data URL with base64.", param=param)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"{param} must be the base64 of a PNG, JPEG or WebP file, not an address.", param=param
        ) from error


def check_files(source: SourceImage) -> SourceImage:
    """Refuses files of other formats and with too many pixels by their headers."""
    measure(source.image, "image")
    if source.mask is not None:
        measure(source.mask, "mask")
    return source


def size_of(card: ImageCard, source: SourceImage) -> tuple[int, int]:
    """Return the width and height of a drawing that follows its source."""
    return card.size_like(*measure(source.image, "image"))


_NAMES = ("name", "lora_name", "adapter", "path")
_SCALES = ("scale", "lora_scale")


def named_adapters(body: ImageGeneration) -> tuple[list[str] | None, list[float] | None]:
    """Return the names and weights that a body gives in one of its ways.

    `path` of other servers is the name of a served adapter here, as any other would read files.
    """
    others = {
        "lora": None if body.lora is None else [body.lora],
        "loras": body.loras,
        "image_loras": body.image_loras,
    }
    given = {field: loras for field, loras in others.items() if loras is not None}
    if not given:
        return body.adapters, body.adapter_weights
    own = [name for name in ("adapters", "adapter_weights") if getattr(body, name) is not None]
    fields = [*own, *given]
    if len(fields) > 1:
        raise InvalidRequest(
            f"{' and '.join(fields)} both name adapters: send one of them.", param=fields[-1]
        )
    ((field, loras),) = given.items()
    names = [str(_only(lora, _NAMES, field)) for lora in loras]
    return names, _weights([_only(lora, _SCALES, field) for lora in loras], field)


def _weights(scales: Sequence[object], field: str) -> list[float] | None:
    """Return the weights; None: all are the adapters' own."""
    given = [scale for scale in scales if isinstance(scale, float)]
    if given and len(given) < len(scales):
        raise InvalidRequest(f"Give each of {field} a scale, or none of them.", param=field)
    return given or None


def _only(lora: NamedLora, fields: Sequence[str], param: str) -> object:
    """Return the value of the one field that is given; a name must be."""
    values = {name: getattr(lora, name) for name in fields if getattr(lora, name) is not None}
    if len(set(values.values())) > 1 or (not values and fields is _NAMES):
        raise InvalidRequest(
            f"Each of {param} needs one of {', '.join(fields)}, got {list(values) or 'none'}.",
            param=param,
        )
    return next(iter(values.values()), None)


ADAPTER_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("adapter", "adapter_name", "adapter_names"), "adapters"),
    **dict.fromkeys(("lora_id", "lora_name", "lora_path", "lora_request"), "adapters"),
    **dict.fromkeys(("lora_names", "loras_names", "image_lora"), "adapters"),
    **dict.fromkeys(("adapter_weight", "adapter_scale", "adapter_scales"), "adapter_weights"),
    **dict.fromkeys(("weight", "weights", "lora_scale", "lora_scales"), "adapter_weights"),
    **dict.fromkeys(("lora_weight", "lora_weights", "scales"), "adapter_weights"),
}
"""Names of adapters and weights in other APIs -> the field that is meant."""
_MEANT: Mapping[str, str] = {
    **ADAPTER_FIELDS,
    **dict.fromkeys(("num_steps", "inference_steps", "sampling_steps"), "num_inference_steps"),
    **dict.fromkeys(("cfg_scale", "cfg", "guidance_weight"), "guidance_scale"),
    **dict.fromkeys(("true_cfg", "real_cfg_scale"), "true_cfg_scale"),
    **dict.fromkeys(("negative", "neg_prompt", "uc"), "negative_prompt"),
    **dict.fromkeys(("sampler_name", "sampler_index", "scheduler"), "sampler"),
    **dict.fromkeys(("num_images", "num_outputs", "batch_size", "n_iter"), "n"),
    **dict.fromkeys(("num_images_per_prompt", "num_samples"), "n"),
    **dict.fromkeys(("image_size", "resolution", "aspect_ratio"), "size"),
    **dict.fromkeys(("strength", "denoising_strength", "prompt_strength"), "strength"),
    **dict.fromkeys(("image", "images", "image_url", "image_b64", "input_image"), "image"),
    **dict.fromkeys(("init_image", "init_images"), "image"),
    **dict.fromkeys(("mask", "mask_b64", "mask_image", "mask_url"), "mask"),
    "mask_blur": "mask_blur",
}
_UNSERVED = (
    *("clip_skip", "controlnet", "control_image", "eta", "guidance_rescale"),
    *("ip_adapter_image", "refiner", "style_preset", "styles"),
)
_ALIKE = 0.85


def names_in(raw: bytes) -> list[str]:
    """Return the fields of a body that have a value."""
    fields = decode(raw, dict[str, msgspec.Raw])
    return [name for name, value in fields.items() if bytes(value).strip() != b"null"]


def check_names(given: Iterable[str], body: type[msgspec.Struct]) -> None:
    """Raise InvalidRequest for the first field that is a near miss of one of the body."""
    known = body.__struct_fields__
    for name in given:
        if name not in known and (advice := _advice(name, known)):
            raise _refused(name, advice)


def check_adapter_names(given: Iterable[str], body: type[msgspec.Struct]) -> None:
    """Raise InvalidRequest for the first field that means adapters in another API."""
    for name in given:
        if name not in body.__struct_fields__ and name in ADAPTER_FIELDS:
            raise _refused(name, f"send {ADAPTER_FIELDS[name]}")


def _advice(name: str, known: tuple[str, ...]) -> str | None:
    """Return what to do instead of sending a field; None: it is ignored."""
    if name in _MEANT:
        meant = _MEANT[name]
        return f"send {meant}" if meant in known else "use POST /v1/images/edits"
    if name in _UNSERVED:
        return "leave it out"
    alike = difflib.get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return f"send {alike[0]}" if alike else None


def _refused(name: str, advice: str) -> InvalidRequest:
    return InvalidRequest(f"{name[:100]} is no field of this route: {advice}.", param=name[:100])
