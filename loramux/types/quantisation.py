"""Formats of quantised weights, as config.json describes them; no tensors are read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from loramux.types.vision import text_name

ActivationScope = Literal["tensor", "token", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """How a checkpoint intends the inputs of its linears to be quantised."""

    dtype: Literal["fp8", "int8", "fp4"]
    scope: ActivationScope
    """Elements that share a scale."""
    is_dynamic: bool
    """Scales come from the input itself, not from the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """FP8 E4M3 codes with a scale per tensor, row or block."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a row or the tensor, as the scale's shape says."""
    activations: Activations | None = None

    @property
    def label(self) -> str:
        return (
            "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format:
    """int8 codes with a scale per tensor, row, or group of inputs of a row."""

    group_size: int | None = None
    symmetric: bool = True
    activations: Activations | None = None

    @property
    def label(self) -> str:
        return "int8" if self.group_size is None else f"int8 in groups of {self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat:
    """AWQ "gemm": 4-bit codes packed along outputs, with zero points."""

    group_size: int | None
    """Inputs that share a scale; None: all."""

    @property
    def label(self) -> str:
        return "AWQ int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat:
    """GPTQ: codes packed along inputs, with zero points."""

    bits: int
    group_size: int | None
    act_order: bool = False
    """The group of each input is stored in `g_idx`."""
    stores_zeros_minus_one: bool = True
    """Version 1 of the format."""

    @property
    def label(self) -> str:
        return f"GPTQ int{self.bits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntFormat:
    """compressed-tensors pack-quantized: codes packed along inputs in a dense bit stream."""

    bits: int
    group_size: int | None
    symmetric: bool = True

    @property
    def label(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Format:
    """E2M1 codes with a scale per block of inputs."""

    block_size: Literal[16, 32]
    """16: NVFP4, FP8 scales and a scale of the tensor. 32: MXFP4, powers of two."""
    divides_by_global: bool = False
    """The scale of the tensor is stored as its inverse, as compressed-tensors does."""
    activations: Activations | None = None

    @property
    def label(self) -> str:
        return "NVFP4" if self.block_size == 16 else "MXFP4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4Format:
    """bitsandbytes 4 bit: codes of a 16-entry table, a scale per block of the flat weight."""

    table: Literal["nf4", "fp4"]

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.table}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb8Format:
    """bitsandbytes LLM.int8(): int8 codes with the largest magnitude of each row."""

    @property
    def label(self) -> str:
        return "bitsandbytes int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class HqqFormat:
    """HQQ: codes packed by parts of the grouped matrix, scales and float zero points."""

    bits: int
    group_size: int | None
    axis: Literal[0, 1]

    @property
    def label(self) -> str:
        return f"HQQ int{self.bits}"


WeightFormat = (
    Fp8Format
    | Int8Format
    | AwqFormat
    | GptqFormat
    | PackedIntFormat
    | Fp4Format
    | Bnb4Format
    | Bnb8Format
    | HqqFormat
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of all modules whose name a pattern matches; None: not quantised."""

    pattern: str
    kind: Literal["name", "regex", "skip"]
    """name: equal. regex: matches from the start. skip: as transformers matches modules to skip."""
    format: WeightFormat | None

    def matches(self, module: str) -> bool:
        return any(self._matches(name) for name in {module, text_name(module) or module})

    def _matches(self, module: str) -> bool:
        if self.kind == "regex":
            return _compiled(self.pattern).match(module) is not None
        pattern = text_name(self.pattern) or self.pattern
        if self.kind == "name":
            return module in (self.pattern, pattern)
        parts = f".{module}."
        return f".{pattern}." in parts or module.endswith(pattern)


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a checkpoint are quantised, by module."""

    method: str
    """quant_method of config.json"""
    rules: tuple[Rule, ...]
    """The first that matches a module decides."""
    default: WeightFormat | None
    """Format of linears that no rule matches."""
    folds_scales: bool = False
    """Norms and rows may be divided by scales that the next weights are multiplied by."""

    def format_of(self, module: str) -> WeightFormat | None:
        """Return the format of a linear by its name in the checkpoint; None: not quantised."""
        for rule in self.rules:
            if rule.matches(module):
                return rule.format
        return self.default

    @cached_property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The distinct formats, the most general first."""
        found = [self.default, *(rule.format for rule in self.rules)]
        return tuple(dict.fromkeys(one for one in found if one is not None))

    @property
    def label(self) -> str:
        """The formats in words, such as "FP8 in blocks of 128 x 128"."""
        return " and ".join(dict.fromkeys(one.label for one in self.formats))


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
