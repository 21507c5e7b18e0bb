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
from loramux.models.quantised.integer import IntegerFormat
from loramux.types.model import LinearSpec
from loramux.types.quantisation import (
    Activations,
    AwqFormat,
    Fp8Format,
    GptqFormat,
    PackedIntFormat,
)


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
    """Keeps the linears of all layers in one format, routers and the output head excepted."""

    weight_format: object

    def format_of(self, module: str) -> object | None:
        is_router = module.endswith(".gate")
        return self.weight_format if ".layers." in module and not is_router else None


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """Keeps the weights that a checkpoint stores quantised in the formats of the checkpoint."""

    quantisation: Quantisation
    modules: frozenset[str]

    def format_of(self, module: str) -> object | None:
        return self.quantisation.format_of(module) if module in self.modules else None


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


def fp8_linear(
    spec: LinearSpec, weight_format: Fp8Format, *, dtype: torch.dtype, device: torch.device
) -> EightBitLinear | None:
    """Round inputs where the format does so at a scale per token; blocks keep their bits."""
    ops, block, inputs = select_quantised_gemm(device, dtype), weight_format.block, None
    if ops is None or not EightBitLinear.supports(spec, block):
        return None
    if block is None:
        inputs = weight_format.activations
    return EightBitLinear(
        spec,
        ops,
        dtype=dtype,
        device=device,
        group=None if block is None else block[1],
        rounds_inputs=inputs is not None and inputs.dtype == "fp8",
    )


def int4_linear(
    spec: LinearSpec, weight_format: IntegerFormat, *, dtype: torch.dtype, device: torch.device
) -> FourBitLinear | None:
    ops, group = select_quantised_gemm(device, dtype), weight_format.group_size
    is_reordered = isinstance(weight_format, GptqFormat) and weight_format.act_order
    has_four_bits = isinstance(weight_format, AwqFormat) or weight_format.bits == 4
    if ops is None or group is None or is_reordered or not has_four_bits:
        return None
    if not FourBitLinear.supports(spec, group):
        return None
    return FourBitLinear(spec, ops, group=group, dtype=dtype, device=device)


METHODS: dict[type, MakeLinear] = {
    Int8Rows: int8_linear,
    Fp8Format: fp8_linear,
    AwqFormat: int4_linear,
    GptqFormat: int4_linear,
    PackedIntFormat: int4_linear,
}
"""The linear of each format that is kept; weights in other formats are dequantised at the load."""

FP8_AT_LOAD = Fp8Format(activations=Activations(dtype="fp8", scope="token", is_dynamic=True))
INT4_AT_LOAD = PackedIntFormat(bits=4, group_size=128, symmetric=False)
AT_LOAD: dict[str, Callable[[], Quantisation | None]] = {
    "none": lambda: None,
    "int8": lambda: LayersAs(Int8Rows()),
    "fp8": lambda: LayersAs(FP8_AT_LOAD),
    "int4": lambda: LayersAs(INT4_AT_LOAD),
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
        method = None
        if make is not None:
            method = make(spec, found, dtype=dtype, device=torch.device(device))
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
