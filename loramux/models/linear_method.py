"""Makes the linears of a decoder in the format that their weights are kept in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import LinearMethod
from loramux.models.int8_linear import Int8Linear
from loramux.models.layers import Linear
from loramux.types.model import LinearSpec


class Quantisation(Protocol):
    """The format of the weight of each module."""

    def format_of(self, module: str) -> object | None:
        """Return the format of a linear by its name in the checkpoint; None: floating point."""
        ...


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Symmetric int8 codes with a scale per output."""


@dataclass(frozen=True, slots=True)
class LayersAs:
    """Keeps the linears of all layers in one format, and the output head in floating point."""

    weight_format: object

    def format_of(self, module: str) -> object | None:
        return self.weight_format if ".layers." in module else None


class MakeLinear(Protocol):
    """Makes a linear of one format without weights."""

    def __call__(
        self, spec: LinearSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> LinearMethod: ...


METHODS: dict[type, MakeLinear] = {Int8Rows: Int8Linear}
"""The linear of each format that is kept; weights in other formats are dequantised at the load."""

AT_LOAD: dict[str, Callable[[], Quantisation | None]] = {
    "none": lambda: None,
    "int8": lambda: LayersAs(Int8Rows()),
}
"""Values of the setting `quantization`: formats that weights are brought to when they are read."""


def quantisation_at_load(name: str) -> Quantisation | None:
    if name not in AT_LOAD:
        raise UnsupportedModel(
            f"Weights cannot be quantised to {name!r}; valid values: {', '.join(AT_LOAD)}."
        )
    return AT_LOAD[name]()


def linear_method(
    spec: LinearSpec,
    quantisation: Quantisation | None,
    *,
    path: str = "",
    dtype: torch.dtype,
    device: torch.device | str,
) -> LinearMethod:
    """Make a linear without weights; the checkpoint's tensors go into its `slots`.

    path: of the module that holds the projections: model.layers.0.self_attn
    dtype: of inputs and outputs
    """
    make = None if quantisation is None else _method(spec, quantisation, path)
    if make is not None:
        return make(spec, dtype=dtype, device=device)
    return Linear(
        spec.in_features, spec.num_outputs, bias=spec.has_bias, dtype=dtype, device=device
    )


def _method(spec: LinearSpec, quantisation: Quantisation, path: str) -> MakeLinear | None:
    """Return what makes the linear; None where its projections have no or several formats."""
    modules = [f"{path}.{name}" if path else name for name in spec.projections]
    found = {quantisation.format_of(module) for module in modules}
    return METHODS.get(type(found.pop())) if len(found) == 1 else None
