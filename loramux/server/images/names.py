"""The names of an image model and its adapters, and the selection that a request means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loramux.backend.host import AdapterHost
from loramux.backend.images import ImageAdapterCard
from loramux.errors import AdapterRefused, InvalidRequest, suggest
from loramux.server.naming.names import AdapterNames, GivenName, NamedAdapter
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.types.composition import compose
from loramux.types.request import Selection


class UnknownAdapter(AdapterRefused):
    """A request for images names an adapter that is not served."""

    param = "adapters"

    def __init__(self, message: str) -> None:
        super().__init__("unknown_adapter", message)


@dataclass(frozen=True, slots=True)
class NamedImageAdapter:
    """A given name of an adapter of the image model."""

    name: str
    card: ImageAdapterCard
    weight: float
    """Used where a request names none."""


Chosen = tuple[NamedAdapter, ...]
"""The adapters of a request in its order, with their weights."""


class ImageNames(AdapterNames):
    """Names of adapters of an image model, with the weights that they have by default."""

    takes_weights = True

    def __init__(
        self,
        host: AdapterHost,
        base_names: tuple[str, ...],
        registry: RegistryAdapters | None = None,
    ) -> None:
        super().__init__(host, registry)
        self.base_names = base_names
        self.default: str | None = None
        """The adapter of requests that name none."""
        self._weights: dict[str, float] = {}

    @property
    def adapters(self) -> Mapping[str, NamedImageAdapter]:
        """The given names whose adapters are there, in the order of their addition."""
        found = {}
        for given in self.given():
            card = None if given.cid is None else self._host.adapters.get(given.cid)
            if isinstance(card, ImageAdapterCard):
                weight = self.weight_of(given.name)
                found[given.name] = NamedImageAdapter(given.name, card, weight)
        return found

    def weight_of(self, name: str) -> float:
        """Return the weight of an adapter in requests that name none."""
        return self._weights.get(name, 1.0)

    def set_weight(self, name: str, weight: float) -> None:
        self._weights[name] = weight

    def set_default(self, name: str | None) -> None:
        """Raise InvalidRequest for a name that is not given."""
        if name is not None and self.find(name) is None:
            known = [given.name for given in self.given()]
            raise InvalidRequest(
                f"The default adapter {name!r} is not among the adapters. "
                f"{suggest(name, known) if known else 'There are none.'}",
                param="image_default_lora",
            )
        self.default = name

    def described(self, given: GivenName) -> dict[str, Any]:
        named = self.adapters.get(given.name)
        fields: dict[str, Any] = {
            "modality": "image",
            "is_default": given.name == self.default,
            "weight": self.weight_of(given.name),
        }
        if named is not None:
            card = named.card
            fields |= {
                "cid": card.cid,
                "rank": card.rank,
                "trigger_words": list(card.trigger_words),
            }
        return fields

    async def unload(self, name: str) -> None:
        await super().unload(name)
        self._weights.pop(name, None)
        if self.default == name:
            self.default = None


def selection_of(chosen: Chosen) -> Selection:
    return compose((one.cid, one.weight) for one in chosen)
