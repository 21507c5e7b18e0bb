"""How the hidden states of a prompt become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loramux.errors import InvalidRequest


class Pooling(StrEnum):
    """Which hidden states, after the final norm, make the vector of a prompt."""

    LAST = "last"
    """That of the last token."""
    MEAN = "mean"
    """The mean over all tokens."""
    HEAD = "head"
    """The outputs of a classification head at the last token."""


class Activation(StrEnum):
    """What turns the outputs of a classification head into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPooling:
    """Which vectors a model gives, by its configuration and the setting `pooling`."""

    pooling: Pooling | None = None
    """None: the model only generates."""
    refusal: str = ""
    """Why there is no pooling, and what to do."""
    normalize: bool = True
    """Whether embeddings have length 1."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which embeddings may be shortened (Matryoshka); empty: any; None: none."""
    labels: tuple[str, ...] = ()
    """Labels of the classification head, in the order of its outputs."""
    activation: Activation = Activation.NONE
    generates: bool = True
    """Whether the model has an output head over its vocabulary."""


def as_pooling(name: Pooling | str | None) -> Pooling:
    """Return the pooling of embeddings with this name; raise InvalidRequest for another."""
    if name not in (Pooling.LAST, Pooling.MEAN):
        raise InvalidRequest(f"pooling must be last or mean, got {str(name)!r}.", param="pooling")
    return Pooling(name)


def check_dimensions(dimensions: int | None, model: ModelPooling, hidden_size: int) -> None:
    """Raise InvalidRequest if embeddings cannot be shortened to so many numbers."""
    if dimensions is None or dimensions == hidden_size:
        return
    allowed = model.dimensions
    if allowed is None:
        raise InvalidRequest(
            f"dimensions must be {hidden_size}: the model was not trained for shorter embeddings "
            "(Matryoshka): config.json sets neither is_matryoshka nor matryoshka_dimensions.",
            param="dimensions",
        )
    if allowed and dimensions not in allowed:
        raise InvalidRequest(
            f"dimensions must be one of {', '.join(map(str, allowed))}, got {dimensions}.",
            param="dimensions",
        )
    if not 0 < dimensions <= hidden_size:
        raise InvalidRequest(
            f"dimensions must be 1 to {hidden_size}, got {dimensions}.", param="dimensions"
        )
