"""Fields that a body for images does not have, and that must not be ignored.

A drawing that ignored them would look right and be another one than the client asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.http.body import decode

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
