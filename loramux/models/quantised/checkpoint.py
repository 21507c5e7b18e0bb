"""Reads a quantised checkpoint as if it were a dense one, module by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loramux.errors import UnsupportedModel
from loramux.models.quantised.bitsandbytes import STATE, dequantise_bnb4
from loramux.models.quantised.eight_bit import dequantise_bnb8, dequantise_fp8, dequantise_int8
from loramux.models.quantised.fp4 import dequantise_fp4
from loramux.models.quantised.hqq import dequantise_hqq
from loramux.models.quantised.integer import dequantise_integers
from loramux.models.quantised.parts import Parts
from loramux.models.tensor_files import NamedRead, Read, open_tensors
from loramux.types.quantisation import (
    AwqFormat,
    Bnb4Format,
    Bnb8Format,
    Fp4Format,
    Fp8Format,
    GptqFormat,
    HqqFormat,
    Int8Format,
    PackedIntFormat,
    Quantisation,
    WeightFormat,
)
from loramux.types.vision import text_name

DEQUANTISERS: dict[type[Any], Callable[[Parts, Any], Tensor]] = {
    Fp8Format: dequantise_fp8,
    Int8Format: dequantise_int8,
    AwqFormat: dequantise_integers,
    GptqFormat: dequantise_integers,
    PackedIntFormat: dequantise_integers,
    Fp4Format: dequantise_fp4,
    Bnb4Format: dequantise_bnb4,
    Bnb8Format: dequantise_bnb8,
    HqqFormat: dequantise_hqq,
}
_INTEGER = ("qweight", "qzeros", "scales")
_BNB4 = tuple(f"weight.{n}" for n in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
_SCALED = ("weight", "weight_scale", "weight_zero_point")
PARTS: dict[type[Any], frozenset[str]] = {
    Fp8Format: frozenset({"weight", "weight_scale", "weight_scale_inv"}),
    Int8Format: frozenset(_SCALED),
    AwqFormat: frozenset(_INTEGER),
    GptqFormat: frozenset({*_INTEGER, "g_idx"}),
    PackedIntFormat: frozenset(
        {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
    ),
    Fp4Format: frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"}
    )
    | {"blocks", "scales"},
    Bnb4Format: frozenset({"weight", *_BNB4, f"{STATE}nf4", f"{STATE}fp4"}),
    Bnb8Format: frozenset({"weight", "SCB", "weight_format"}),
    HqqFormat: frozenset({"W_q", "scale", "zero", "shape", "nbits", "group_size", "axis"})
    | {"quant_scale", "quant_zero", "packing", "unpack_view_dtype", "view_as_float"}
    | {"compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"}
    | {"channel_wise", "optimize", "round_zero"},
}
"""The tensors of a module by its format, by the end of their names."""

# Scales of activations and of the KV cache: inputs and keys stay in floating point.
UNUSED = re.compile(
    r"(^|\.)(input_scale|input_scale_ub|input_zero_point|input_global_scale|activation_scale"
    r"|output_scale|output_zero_point|[qkv]_scale|kv_scale|prob_scale|[qkv]_zero_point)$"
)
EXPERT_PARTS = {"_blocks": "blocks", "_scales": "scales"}
FLOAT_NAMES = ("F32", "F16", "BF16")


def dequantised_weights(
    files: list[Path], quantisation: Quantisation, device: torch.device
) -> Iterator[NamedRead]:
    """Yield all weights of the dense checkpoint; each is dequantised when it is read."""
    with ExitStack() as stack:
        yield from QuantisedCheckpoint(files, quantisation, stack, device).weights()


def packed_modules(files: list[Path], quantisation: Quantisation) -> frozenset[str]:
    """Return the modules whose codes can be kept as they are; reads headers alone.

    Modules in floating point are none of them, nor those whose inputs are ordered by activation.
    """
    with ExitStack() as stack:
        found = QuantisedCheckpoint(files, quantisation, stack, torch.device("cpu")).modules
        return frozenset(
            text_name(module) or module
            for module, parts in found.items()
            if "weight_g_idx" not in parts
        )


@dataclass(frozen=True, slots=True)
class PackedRead:
    """Reads the weight of a quantised module: dequantised, or its parts."""

    parts: Parts
    weight_format: WeightFormat

    def __call__(self) -> Tensor:
        weight = DEQUANTISERS[type(self.weight_format)](self.parts, self.weight_format)
        if not bool(weight.isfinite().all()):
            raise self.parts.damaged()
        return weight


class QuantisedCheckpoint:
    """The tensors of safetensors files, in which modules of several tensors are one weight."""

    def __init__(
        self, files: list[Path], quantisation: Quantisation, stack: ExitStack, device: torch.device
    ) -> None:
        """`stack` closes the files. `device`: where weights are dequantised."""
        self._quantisation = quantisation
        self._device = device
        self._readers: dict[str, Read] = {}
        self._dtypes: dict[str, str] = {}
        for file in files:
            tensors = open_tensors(file, stack)
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in self._readers:
                    raise UnsupportedModel(f"Two weight files have the tensor {name}.")
                self._readers[name] = partial(tensors.get_tensor, name)
                self._dtypes[name] = tensors.get_slice(name).get_dtype()
        self._modules = self._group()

    def _group(self) -> dict[str, dict[str, str]]:
        """Return the tensors of each quantised module: names by the end of the name."""
        found = {type(one) for one in self._quantisation.formats}
        known = frozenset().union(*(PARTS[kind] for kind in PARTS if kind is not HqqFormat))
        known |= PARTS[HqqFormat] if HqqFormat in found else frozenset()
        modules: dict[str, dict[str, str]] = {}
        for name in self._readers:
            module, part = split_name(name, known)
            if part is not None:
                modules.setdefault(module, {})[part] = name
        return {
            module: parts
            for module, parts in modules.items()
            if set(parts) != {"weight"} or self._dtypes[parts["weight"]] not in FLOAT_NAMES
        }

    @property
    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """The tensors of each quantised module: names by the end of the name."""
        return self._modules

    def weights(self) -> Iterator[NamedRead]:
        """Yield the name of every weight of the dense checkpoint with a function that reads it."""
        packed = {name: module for module, p in self._modules.items() for name in p.values()}
        yielded: set[str] = set()
        for name, read in self._readers.items():
            module = packed.get(name)
            if module is None:
                if not UNUSED.search(name):
                    yield name, read
            elif module not in yielded:
                yielded.add(module)
                yield self._weight_name(module), self._read(module)

    def _weight_name(self, module: str) -> str:
        return module if "blocks" in self._modules[module] else f"{module}.weight"

    def _read(self, module: str) -> PackedRead:
        names = self._modules[module]
        weight_format = self._format_of(module, names)
        readers = {part: self._readers[name] for part, name in names.items()}
        return PackedRead(Parts(module, weight_format.label, readers, self._device), weight_format)

    def _format_of(self, module: str, names: dict[str, str]) -> WeightFormat:
        found = self._quantisation.format_of(module)
        if found is None:
            raise UnsupportedModel(
                f"{module} is stored in {', '.join(sorted(names))}, and config.json does not say "
                "how it is quantised."
            )
        others = sorted(set(names) - PARTS[type(found)])
        if others:
            raise UnsupportedModel(
                f"{module} has {', '.join(others)}, which is not part of {found.label}: the file "
                "mixes methods, or config.json names another one."
            )
        return found


def split_name(name: str, known: frozenset[str]) -> tuple[str, str | None]:
    """Split a name into its module and the known end; None for another tensor."""
    for suffix, part in EXPERT_PARTS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    module, _, rest = name.rpartition(".weight.")
    if module and f"weight.{rest}" in known:
        return module, f"weight.{rest}"
    module, _, last = name.rpartition(".")
    return (module, last) if last in known and module else (name, None)
