"""Adapters of a request for images: the own fields, and those of other image servers."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.errors import InvalidRequest
from loramux.wire.images import ImageGeneration, NamedLora

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
