"""The names of an image model and its adapters, and the selection that a request means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loramux.errors import AdapterRefused, InvalidRequest, suggest
from loramux.image_backend import ImageAdapterCard
from loramux.server.errors import NotServed
from loramux.types.composition import check_count, check_weights, compose, find_repeated
from loramux.types.request import Selection


class UnknownAdapter(AdapterRefused):
    """A request for images names an adapter that is not served."""

    param = "adapters"

    def __init__(self, message: str) -> None:
        super().__init__("unknown_adapter", message)


@dataclass(frozen=True, slots=True)
class NamedImageAdapter:
    name: str
    card: ImageAdapterCard
    weight: float
    """Used where a request names none."""


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """An adapter of a request, with its weight there."""

    name: str
    cid: str
    weight: float


Chosen = tuple[ChosenAdapter, ...]
"""The adapters of a request in its order."""


@dataclass(slots=True)
class ImageNames:
    base_names: tuple[str, ...]
    adapters: dict[str, NamedImageAdapter] = field(default_factory=dict)
    default: str | None = None
    """The adapter of requests that name none."""

    def bind(self, name: str, card: ImageAdapterCard, weight: float) -> None:
        if name in self.adapters or name in self.base_names:
            raise InvalidRequest(f"The name {name!r} is given to two models.", param="image_lora")
        self.adapters[name] = NamedImageAdapter(name, card, weight)

    def set_default(self, name: str | None) -> None:
        if name is not None and name not in self.adapters:
            known = suggest(name, list(self.adapters)) if self.adapters else "There are none."
            raise InvalidRequest(
                f"The default adapter {name!r} is not among the adapters. {known}",
                param="image_default_lora",
            )
        self.default = name

    def choose(
        self,
        model: str | None,
        adapters: Sequence[str] | None,
        weights: Sequence[float] | None,
    ) -> Chosen:
        """Returns the adapters that the own routes mean: none are the default, [] is the base.

        `model` may also be the name of an adapter.
        """
        if model is not None and model not in self.base_names:
            if model not in self.adapters:
                raise NotServed(f"The model `{model[:200]}` does not exist.", param="model")
            if adapters:
                raise InvalidRequest(
                    f"`model` is the adapter {model}, and `adapters` names others: name the base "
                    "in `model`.",
                    param="adapters",
                )
            adapters = [model]
        if adapters is None:
            if weights is not None:
                raise InvalidRequest("adapter_weights needs adapters.", param="adapter_weights")
            adapters = [] if self.default is None else [self.default]
        return self.weigh(adapters, weights)

    def choose_deployed(
        self, deployment: str, adapters: Sequence[str], weights: Sequence[float] | None
    ) -> Chosen:
        """Returns the adapters that sheaf's routes mean: [] is the default.

        There, the name of the deployment as the only adapter is the base.
        """
        if list(adapters) == [deployment] and deployment not in self.adapters:
            return ()
        if not adapters and self.default is not None:
            adapters = [self.default]
        if adapters and not self.adapters:
            raise UnknownAdapter(
                f"Request specifies adapters {list(adapters)} but deployment '{deployment}' has no "
                "LoRA configured."
            )
        return self.weigh(adapters, weights, deployment)

    def weigh(
        self, names: Sequence[str], weights: Sequence[float] | None, deployment: str | None = None
    ) -> Chosen:
        unknown = [name for name in names if name not in self.adapters]
        if unknown:
            raise UnknownAdapter(
                f"Unknown adapter(s) {unknown}; deployment '{deployment or self.base_names[0]}' "
                f"has: {sorted(self.adapters)}"
            )
        if weights is None:
            weights = [self.adapters[name].weight for name in names]
        if len(weights) != len(names):
            raise InvalidRequest(
                f"adapter_weights length ({len(weights)}) must match adapters length "
                f"({len(names)})",
                param="adapter_weights",
            )
        check_count(len(names), param="adapters")
        check_weights(weights, param="adapter_weights")
        cids = [self.adapters[name].card.cid for name in names]
        repeated = find_repeated(cids)
        if repeated is not None:
            raise InvalidRequest(
                f"The adapters {names[repeated[0]]!r} and {names[repeated[1]]!r} are the same; "
                "name each once.",
                param="adapters",
            )
        return tuple(
            ChosenAdapter(name, cid, float(weight))
            for name, cid, weight in zip(names, cids, weights, strict=True)
        )


def selection_of(chosen: Chosen) -> Selection:
    return compose((one.cid, one.weight) for one in chosen)
