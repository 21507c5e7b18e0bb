"""llama.cpp's adapters by their place in a list, and the default selection."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import replace
from typing import Any

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.errors import Forbidden
from loramux.server.http.body import decode
from loramux.server.naming.names import GivenName
from loramux.types.caller import ANONYMOUS, Caller

MAX_TENANTS = 1024


class PlacedAdapters:
    """Gives each name a place in the order of its addition; a place is never given again.

    Each tenant has places of its own for the names that it sees. At first no adapter is selected,
    because several that all act at once are of no use; only operators change that, for operators.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._places: OrderedDict[str | None, list[str]] = OrderedDict()
        self._scales: dict[int, float] = {}

    def listed(self, caller: Caller) -> list[dict[str, Any]]:
        names, given = self._refresh(caller)
        scales = self._scales if caller.is_operator else {}
        return [
            {
                "id": place,
                "path": given[name].path if caller.is_operator else name,
                "scale": scales.get(place, 0.0),
                "task_name": "",
                "prompt_prefix": "",
                "name": name,
            }
            for place, name in enumerate(names)
            if name in given
        ]

    def set_scales(self, raw: bytes) -> dict[str, float]:
        """Set and return the default selection; adapters that are not named get 0."""
        if not self._context.options.allow_runtime_lora_updating:
            raise Forbidden(
                "This server does not change its adapters at run time: start it with "
                "--allow-runtime-lora-updating, or send lora in each request."
            )
        asked = decode(raw, Any)
        if not isinstance(asked, list):
            raise InvalidRequest("Request body must be an array")
        names, given = self._refresh(ANONYMOUS)
        self._scales = self._parse(asked, names, given)
        return {names[place]: scale for place, scale in self._scales.items()}

    def selection(self, lora: Any, model: str | None, caller: Caller) -> dict[str, Any]:
        """Return the fields of the own API for a body's `lora`; empty or absent: the default
        selection, unless the body names a model."""
        if lora is not None and not isinstance(lora, list):
            raise _bad_lora()
        if not lora and model and model not in self._context.base_names:
            return {}
        names, given = self._refresh(caller)
        default = self._scales if caller.is_operator else {}
        scales = self._parse(lora, names, given) if lora else default
        used = {place: scale for place, scale in scales.items() if scale != 0}
        if not used and not lora:
            return {}
        return {
            "adapters": [names[place] for place in used],
            "adapter_weights": list(used.values()),
        }

    def _parse(
        self, entries: list[Any], names: list[str], given: Container[str]
    ) -> dict[int, float]:
        scales: dict[int, float] = {}
        for entry in entries:
            if not isinstance(entry, dict):
                raise _bad_lora()
            place: Any = entry.get("id")
            scale = entry.get("scale", 0)
            if isinstance(place, str) and place in names:
                place = names.index(place)
            is_place = isinstance(place, int) and not isinstance(place, bool)
            known = range(len(names))
            if not is_place or place not in known or names[int(place)] not in given:
                raise InvalidRequest(
                    f"There is no adapter {entry.get('id')!r}: see GET /lora-adapters.",
                    param="lora",
                )
            if not isinstance(scale, int | float) or not math.isfinite(scale):
                raise _bad_lora()
            scales[int(place)] = float(scale)
        return scales

    def _refresh(self, caller: Caller) -> tuple[list[str], dict[str, GivenName]]:
        """Return the places of the caller's tenant, and the given names that the caller sees."""
        tenant = self._context.view_of(replace(caller, adapters=None))
        known = {
            one.name: one for one in self._context.names.given() if tenant.sees_given(one.name)
        }
        places = self._places.setdefault(caller.confined_to, [])
        self._places.move_to_end(caller.confined_to)
        if len(self._places) > MAX_TENANTS:
            self._places.popitem(last=False)
        placed = set(places)
        places += [name for name in known if name not in placed]
        view = self._context.view_of(caller)
        return places, {name: one for name, one in known.items() if view.sees_given(name)}


def _bad_lora() -> InvalidRequest:
    return InvalidRequest(
        "'lora' must be an array of objects with 'id' and 'scale' fields", param="lora"
    )
