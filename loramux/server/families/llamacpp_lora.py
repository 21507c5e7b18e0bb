"""llama.cpp's adapters by their place in a list, and the default selection."""

from __future__ import annotations

import math
from typing import Any

from loramux.errors import InvalidRequest
from loramux.server.body import decode
from loramux.server.context import Context
from loramux.server.errors import Forbidden


class PlacedAdapters:
    """Gives each name a place in the order of its addition; a place is never given again.

    At first no adapter is selected, because several that all act at once are of no use.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._names: list[str] = []
        self._scales: dict[int, float] = {}

    def listed(self) -> list[dict[str, Any]]:
        given = self._refresh()
        return [
            {
                "id": place,
                "path": given[name].path,
                "scale": self._scales.get(place, 0.0),
                "task_name": "",
                "prompt_prefix": "",
                "name": name,
            }
            for place, name in enumerate(self._names)
            if name in given
        ]

    def set_scales(self, raw: bytes) -> None:
        """Sets the default selection; adapters that are not named get 0."""
        if not self._context.options.allow_runtime_lora_updating:
            raise Forbidden(
                "This server does not change its adapters at run time: start it with "
                "--allow-runtime-lora-updating, or send lora in each request."
            )
        asked = decode(raw, Any)
        if not isinstance(asked, list):
            raise InvalidRequest("Request body must be an array")
        self._scales = self._parse(asked)

    def selection(self, lora: Any, model: str | None) -> dict[str, Any]:
        """Returns the fields of the own API for a body's `lora`; empty or absent: the default
        selection, unless the body names a model."""
        if lora is not None and not isinstance(lora, list):
            raise _bad_lora()
        if not lora and model and model not in self._context.base_names:
            return {}
        scales = self._parse(lora) if lora else self._scales
        used = {place: scale for place, scale in scales.items() if scale != 0}
        if not used and not lora:
            return {}
        return {
            "adapters": [self._names[place] for place in used],
            "adapter_weights": list(used.values()),
        }

    def _parse(self, entries: list[Any]) -> dict[int, float]:
        given = self._refresh()
        scales: dict[int, float] = {}
        for entry in entries:
            if not isinstance(entry, dict):
                raise _bad_lora()
            place: Any = entry.get("id")
            scale = entry.get("scale", 0)
            if isinstance(place, str) and place in self._names:
                place = self._names.index(place)
            is_place = isinstance(place, int) and not isinstance(place, bool)
            known = range(len(self._names))
            if not is_place or place not in known or self._names[int(place)] not in given:
                raise InvalidRequest(
                    f"There is no adapter {entry.get('id')!r}: see GET /lora-adapters.",
                    param="lora",
                )
            if not isinstance(scale, int | float) or not math.isfinite(scale):
                raise _bad_lora()
            scales[int(place)] = float(scale)
        return scales

    def _refresh(self) -> dict[str, Any]:
        given = {one.name: one for one in self._context.names.given()}
        self._names += [name for name in given if name not in self._names]
        return given


def _bad_lora() -> InvalidRequest:
    return InvalidRequest(
        "'lora' must be an array of objects with 'id' and 'scale' fields", param="lora"
    )
