"""Parses quantization_config of config.json into the format of every module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from loramux.models.quantised.compressed_config import METHOD as COMPRESSED
from loramux.models.quantised.compressed_config import block_of, parse_compressed
from loramux.models.quantised.settings import (
    Settings,
    group_size,
    integer,
    malformed,
    mapping,
    one_of,
    regex_rule,
    skip_rules,
    strings,
    unsupported,
)
from loramux.types.quantisation import (
    Activations,
    AwqFormat,
    Bnb4Format,
    Bnb8Format,
    Fp4Format,
    Fp8Format,
    GptqFormat,
    HqqFormat,
    Quantisation,
    Rule,
    WeightFormat,
)

GPTQ_BITS = (2, 3, 4, 8)
HQQ_BITS = (1, 2, 3, 4, 5, 6, 8)
# AutoRound's own names of the layouts of AutoAWQ and AutoGPTQ.
AUTO_ROUND_METHODS = {
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
}
FP8_TENSOR = Activations(dtype="fp8", scope="tensor", is_dynamic=False)
FP8_TOKEN = Activations(dtype="fp8", scope="token", is_dynamic=True)
MODELOPT_FORMATS: dict[str, WeightFormat] = {
    "FP8": Fp8Format(activations=FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Format(activations=FP8_TOKEN),
    "FP8_PB_WO": Fp8Format(block=(128, 128)),
    "MXFP8": Fp8Format(block=(1, 32), activations=replace(FP8_TOKEN, scope="group")),
    "NVFP4": Fp4Format(block_size=16),
}


def parse_quantisation(settings: object) -> Quantisation:
    """Parse quantization_config; raise UnsupportedModel, with the alternative, for other formats.

    No tensor is read: an unsupported checkpoint is refused before it is fetched.
    """
    given = mapping(settings, "quantization_config")
    method = method_of(given)
    if method not in PARSERS:
        raise unsupported(method)
    return PARSERS[method](given)


def method_of(settings: Settings) -> str:
    method = settings.get("quant_method")
    if method is None and "config_groups" in settings:
        return COMPRESSED
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    if not isinstance(method, str):
        raise malformed("quant_method is missing")
    if method == "auto-round":
        packing = str(settings.get("packing_format"))
        if packing not in AUTO_ROUND_METHODS:
            raise unsupported(f"AutoRound with packing_format {packing}")
        return AUTO_ROUND_METHODS[packing]
    return method


def skipped(settings: Settings) -> tuple[Rule, ...]:
    names = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "skip_modules")
    return skip_rules([one for name in names for one in strings(settings.get(name), name)])


def parse_fp8(settings: Settings) -> Quantisation:
    block = settings.get("weight_block_size")
    one_of(settings.get("fmt", "e4m3"), "FP8 of the kind", ("e4m3", "float8_e4m3fn"))
    is_dynamic = settings.get("activation_scheme", "dynamic") == "dynamic"
    found = Fp8Format(
        block=None if block is None else block_of(block, "weight_block_size"),
        activations=Activations(
            dtype="fp8", scope="tensor" if block is None else "group", is_dynamic=is_dynamic
        ),
    )
    return Quantisation("fp8", skipped(settings), found)


def parse_fbgemm(settings: Settings) -> Quantisation:
    return Quantisation("fbgemm_fp8", skipped(settings), Fp8Format(activations=FP8_TOKEN))


def parse_awq(settings: Settings) -> Quantisation:
    one_of(integer(settings, "bits", "w_bit"), "AWQ with bits", (4,))
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise unsupported(f"AWQ of the version {version!r}", "Use a checkpoint of version gemm.")
    found = AwqFormat(group_size=group_size(settings, "group_size", "q_group_size"))
    return Quantisation("awq", skipped(settings), found, folds_scales=True)


def parse_gptq(settings: Settings) -> Quantisation:
    layout = str(settings.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        layout = "marlin" if settings.get("is_marlin_format") else layout
        raise unsupported(f"GPTQ in the layout {layout!r}", "Use a checkpoint in the layout gptq.")
    one_of(str(settings.get("pack_dtype", "int32")), "GPTQ packed as", ("int32",))
    found = gptq_format(settings, stores_zeros_minus_one=layout == "gptq")
    overrides = [
        *mapping(settings.get("dynamic") or {}, "dynamic").items(),
        *mapping(settings.get("extra_config") or {}, "extra_config").items(),
    ]
    rules = [gptq_rule(pattern, value, settings, found) for pattern, value in overrides]
    return Quantisation("gptq", (*rules, *skipped(settings)), found)


def gptq_format(settings: Settings, *, stores_zeros_minus_one: bool) -> GptqFormat:
    return GptqFormat(
        bits=one_of(integer(settings, "bits"), "GPTQ with bits", GPTQ_BITS),
        group_size=group_size(settings, "group_size"),
        act_order=bool(settings.get("desc_act", False)),
        stores_zeros_minus_one=stores_zeros_minus_one,
    )


def gptq_rule(pattern: str, value: object, settings: Settings, default: GptqFormat) -> Rule:
    """Return the override of modules: `-:` before a pattern skips them, `+:` changes settings."""
    if pattern.startswith("-:"):
        return regex_rule(pattern.removeprefix("-:"), None, "dynamic")
    changed = {**settings, **mapping(value, pattern)}
    if changed.get("bits") == 16:
        return regex_rule(pattern, None, "dynamic")
    found = gptq_format(changed, stores_zeros_minus_one=default.stores_zeros_minus_one)
    return regex_rule(pattern.removeprefix("+:"), found, "dynamic")


def parse_bitsandbytes(settings: Settings) -> Quantisation:
    found: WeightFormat
    if settings.get("load_in_4bit"):
        table = one_of(
            settings.get("bnb_4bit_quant_type", "fp4"), "bitsandbytes of the type", ("nf4", "fp4")
        )
        found = Bnb4Format(table=table)
    elif settings.get("load_in_8bit"):
        found = Bnb8Format()
    else:
        raise malformed("neither load_in_4bit nor load_in_8bit is set")
    return Quantisation("bitsandbytes", skipped(settings), found)


def parse_mxfp4(settings: Settings) -> Quantisation:
    return Quantisation("mxfp4", skipped(settings), Fp4Format(block_size=32))


def parse_hqq(settings: Settings) -> Quantisation:
    given = mapping(settings.get("quant_config"), "quant_config")
    if "weight_quant_params" in given:
        return Quantisation("hqq", skipped(settings), hqq_format(given))
    rules = tuple(
        regex_rule(rf"(.*\.)?{re.escape(name)}$", hqq_format(mapping(value, name)), name)
        for name, value in given.items()
    )
    if not rules:
        raise malformed("quant_config of hqq is empty")
    return Quantisation("hqq", (*skipped(settings), *rules), None)


def hqq_format(settings: Settings) -> HqqFormat:
    for name in ("scale_quant_params", "zero_quant_params"):
        if settings.get(name):
            raise unsupported(f"HQQ with quantised scales ({name})")
    weights = mapping(settings.get("weight_quant_params", settings), "weight_quant_params")
    axis: Literal[0, 1] = one_of(integer(weights, "axis"), "HQQ with axis", (0, 1))
    bits = one_of(integer(weights, "nbits"), "HQQ with nbits", HQQ_BITS)
    return HqqFormat(bits=bits, group_size=group_size(weights, "group_size"), axis=axis)


def parse_modelopt(settings: Settings) -> Quantisation:
    """Parse ModelOpt's settings, in the form of config.json or of hf_quant_config.json."""
    given = mapping(settings.get("quantization", settings), "quantization")
    algorithm = str(given.get("quant_algo"))
    excluded = given.get("exclude_modules", given.get("ignore"))
    rules = tuple(wildcard_rule(pattern) for pattern in strings(excluded, "exclude_modules"))
    if not given.get("quant_algo"):  # Only the KV cache was calibrated.
        return Quantisation("modelopt", (), None)
    if algorithm == "MIXED_PRECISION":
        layers = mapping(given.get("quantized_layers"), "quantized_layers")
        named = tuple(
            Rule(name, "name", modelopt_format(mapping(value, name)))
            for name, value in layers.items()
        )
        return Quantisation("modelopt", (*rules, *named), None)
    return Quantisation("modelopt", rules, modelopt_format(given))


def modelopt_format(settings: Settings) -> WeightFormat:
    algorithm = str(settings.get("quant_algo"))
    if algorithm not in MODELOPT_FORMATS:
        raise unsupported(f"{algorithm} of ModelOpt", "Use a checkpoint in FP8 or NVFP4.")
    found = MODELOPT_FORMATS[algorithm]
    size = group_size(settings, "group_size")
    if isinstance(found, Fp4Format) and size not in (None, found.block_size):
        raise unsupported(f"{algorithm} of ModelOpt in groups of {size}")
    return found


def wildcard_rule(pattern: str) -> Rule:
    """Return the rule of an excluded name, in which * stands for any text."""
    if "*" not in pattern:
        return Rule(pattern, "skip", None)
    parts = (re.escape(part) for part in pattern.split("*"))
    return regex_rule(".*".join(parts) + "$", None, "exclude_modules")


Parser = Callable[[Settings], Quantisation]
PARSERS: dict[str, Parser] = {
    "fp8": parse_fp8,
    "fbgemm_fp8": parse_fbgemm,
    "compressed-tensors": parse_compressed,
    "awq": parse_awq,
    "gptq": parse_gptq,
    "bitsandbytes": parse_bitsandbytes,
    "mxfp4": parse_mxfp4,
    "hqq": parse_hqq,
    "modelopt": parse_modelopt,
    "modelopt_fp4": parse_modelopt,
}


QUANTISATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which checkpoints keep their settings beside config.json, and the method of each."""
