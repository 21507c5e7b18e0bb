"""Makes the linears of a decoder in the format that their weights are kept in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import LinearMethod
from loramux.kernels.select import select_quantised_gemm
from loramux.models.eight_bit_linear import EightBitLinear
from loramux.models.four_bit_linear import FourBitLinear
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
class Fp8Rows:
    """FP8 E4M3 codes with a scale per output."""

    rounds_inputs: bool = True
    """Whether inputs are rounded to FP8 as well, at a scale per token."""


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """4-bit codes with a scale and a zero point per group of inputs."""

    group: int = 128


@dataclass(frozen=True, slots=True)
class LayersAs:
    """Keeps the linears of all layers in one format, and the output head in floating point."""

    weight_format: object

    def format_of(self, module: str) -> object | None:
        return self.weight_format if ".layers." in module else None


class MakeLinear(Protocol):
    """Makes a linear of one format without weights."""

    def __call__(
        self, spec: LinearSpec, weight_format: Any, *, dtype: torch.dtype, device: torch.device
    ) -> LinearMethod | None:
        """Return None where the device has no kernels for the format or the shape."""
        ...


def int8_linear(
    spec: LinearSpec, weight_format: Int8Rows, *, dtype: torch.dtype, device: torch.device
) -> Int8Linear:
    del weight_format
    return Int8Linear(spec, dtype=dtype, device=device)


def eight_bit_linear(
    spec: LinearSpec, weight_format: Fp8Rows, *, dtype: torch.dtype, device: torch.device
) -> EightBitLinear | None:
    ops = select_quantised_gemm(device, dtype)
    if ops is None or not EightBitLinear.supports(spec):
        return None
    return EightBitLinear(
        spec, ops, dtype=dtype, device=device, rounds_inputs=weight_format.rounds_inputs
    )


def four_bit_linear(
    spec: LinearSpec, weight_format: Int4Groups, *, dtype: torch.dtype, device: torch.device
) -> FourBitLinear | None:
    ops, group = select_quantised_gemm(device, dtype), weight_format.group
    if ops is None or not FourBitLinear.supports(spec, group):
        return None
    return FourBitLinear(spec, ops, group=group, dtype=dtype, device=device)


METHODS: dict[type, MakeLinear] = {
    Int8Rows: int8_linear,
    Fp8Rows: eight_bit_linear,
    Int4Groups: four_bit_linear,
}
"""The linear of each format that is kept; weights in other formats are dequantised at the load."""

AT_LOAD: dict[str, Callable[[], Quantisation | None]] = {
    "none": lambda: None,
    "int8": lambda: LayersAs(Int8Rows()),
    "fp8": lambda: LayersAs(Fp8Rows()),
    "int4": lambda: LayersAs(Int4Groups()),
}
"""Values of the setting `quantization`: formats that weights are brought to when they are read."""


def quantisation_at_load(
    name: str, device: torch.device, dtype: torch.dtype
) -> Quantisation | None:
    if name not in AT_LOAD:
        raise UnsupportedModel(
            f"Weights cannot be quantised to {name!r}; valid values: {', '.join(AT_LOAD)}."
        )
    if name in ("fp8", "int4") and select_quantised_gemm(device, dtype) is None:
        raise UnsupportedModel(
            f"The quantization {name} needs an NVIDIA GPU of compute capability 9.0 (Hopper) or "
            f"later, and a dtype of 16 bits; this is {dtype} on {device}. Use quantization int8 or "
            "none."
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
    if quantisation is not None:
        found = _format(spec, quantisation, path)
        make = METHODS.get(type(found))
        method = make and make(spec, found, dtype=dtype, device=torch.device(device))
        if method is not None:
            return method
    return Linear(
        spec.in_features, spec.num_outputs, bias=spec.has_bias, dtype=dtype, device=device
    )


def _format(spec: LinearSpec, quantisation: Quantisation, path: str) -> object | None:
    """Return the format of all projections; None if they have none or several."""
    modules = [f"{path}.{name}" if path else name for name in spec.projections]
    found = {quantisation.format_of(module) for module in modules}
    return found.pop() if len(found) == 1 else None
