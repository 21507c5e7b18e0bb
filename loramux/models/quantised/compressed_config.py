"""Parses the quantization_config of compressed-tensors (llm-compressor)."""

from __future__ import annotations

from typing import Any, Literal

from loramux.models.quantised.settings import (
    Settings,
    group_size,
    integer,
    malformed,
    mapping,
    named_rules,
    one_of,
    strings,
    unsupported,
)
from loramux.types.quantisation import (
    Activations,
    Fp4Format,
    Fp8Format,
    Int8Format,
    PackedIntFormat,
    Quantisation,
    Rule,
    WeightFormat,
)

METHOD = "compressed-tensors"
MX_BLOCK = 32
# Classes of linear layers as targets: a rule of one of them holds for every linear.
LINEAR_CLASSES = ("Linear", "LinearBase", "ReplicatedLinear")
SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")
MAX_PACKED_BITS = 8


def parse_compressed(settings: Settings) -> Quantisation:
    """Parse config_groups, and per-group formats where the file mixes them."""
    refuse_transforms(settings)
    container = str(settings.get("format"))
    rules: list[Rule] = [*named_rules(strings(settings.get("ignore"), "ignore"), None, "ignore")]
    default: WeightFormat | None = None
    folds = False
    groups = mapping(settings.get("config_groups"), "config_groups")
    if not groups:
        raise malformed("config_groups is empty")
    for name, entry in groups.items():
        group = mapping(entry, name)
        if group.get("weights") is None:
            continue
        weights = mapping(group["weights"], f"{name}.weights")
        activations = parse_activations(group.get("input_activations"), name)
        found = weight_format(str(group.get("format") or container), weights, activations)
        folds |= may_fold(found)
        targets = strings(group.get("targets"), f"{name}.targets")
        if any(target in LINEAR_CLASSES for target in targets):
            if default not in (None, found):
                raise malformed("two groups have every Linear as target")
            default = found
        rules += named_rules([t for t in targets if t not in LINEAR_CLASSES], found, name)
    if default is None and all(rule.format is None for rule in rules):
        raise malformed("no group of config_groups quantises weights")
    return Quantisation(METHOD, tuple(rules), default, folds)


def refuse_transforms(settings: Settings) -> None:
    sparsity = settings.get("sparsity_config") or {}
    sparse = mapping(sparsity, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise unsupported(f"{sparse} (sparse weights, compressed-tensors)")
    transforms = settings.get("transform_config") or {}
    if mapping(transforms, "transform_config").get("config_groups"):
        raise unsupported("rotated weights (transform_config of compressed-tensors)")
    container = settings.get("format")
    if container in SPARSE_FORMATS:
        raise unsupported(f"{container} (compressed-tensors)")


def may_fold(found: WeightFormat) -> bool:
    """Whether recipes of this format smooth: AWQ for packed integers, SmoothQuant for int8 x."""
    if isinstance(found, Int8Format):
        return found.activations is not None
    return isinstance(found, PackedIntFormat)


def weight_format(
    container: str, weights: Settings, activations: Activations | None
) -> WeightFormat:
    """Return the format of a group; `container` names the layout of its tensors."""
    bits, kind = integer(weights, "num_bits"), str(weights.get("type", "int"))
    strategy = str(weights.get("strategy") or "tensor")
    group = group_size(weights, "group_size") if strategy in ("group", "tensor_group") else None
    if strategy in ("group", "tensor_group") and group is None:
        raise malformed(f"strategy {strategy} without group_size")
    symmetric = bool(weights.get("symmetric", True))
    if container == "pack-quantized" and kind == "int":
        if not 1 <= bits <= MAX_PACKED_BITS:
            raise malformed(f"num_bits is {bits}")
        one_of(strategy, "the weight strategy", ("channel", "group"))
        return PackedIntFormat(bits=bits, group_size=group, symmetric=symmetric)
    if container in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        is_nv = container.startswith("nv")
        one_of((bits, kind), "num_bits and type", ((4, "float"),))
        return Fp4Format(
            block_size=16 if is_nv else 32, divides_by_global=is_nv, activations=activations
        )
    if container == "mxfp8-quantized":
        return Fp8Format(block=(1, MX_BLOCK), activations=activations)
    is_plain = container in ("float-quantized", "int-quantized", "naive-quantized")
    if is_plain and (bits, kind) == (8, "float"):
        return Fp8Format(block=fp8_block(strategy, weights, group), activations=activations)
    if is_plain and (bits, kind) == (8, "int"):
        one_of(strategy, "the weight strategy", ("tensor", "channel", "group"))
        return Int8Format(group_size=group, symmetric=symmetric, activations=activations)
    raise unsupported(f"{kind}{bits} in the format {container!r} of compressed-tensors")


def fp8_block(strategy: str, weights: Settings, group: int | None) -> tuple[int, int] | None:
    one_of(strategy, "the weight strategy", ("tensor", "channel", "group", "block"))
    if strategy != "block":
        return None if group is None else (1, group)
    return block_of(weights.get("block_structure"), "block_structure")


def block_of(value: object, name: str) -> tuple[int, int]:
    """Return the rows and columns of a block, written as [128, 128] or "128x128"."""
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(size) for size in sizes)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise malformed(f"{name} is {value!r}, not two sizes") from None
    if rows < 1 or columns < 1:
        raise malformed(f"{name} is {value!r}")
    return rows, columns


def parse_activations(value: Any, name: str) -> Activations | None:
    """Read how inputs would be quantised; weights are computed with floating-point inputs."""
    if value is None:
        return None
    settings = mapping(value, f"{name}.input_activations")
    bits, kind = integer(settings, "num_bits"), settings.get("type", "int")
    names: dict[tuple[int, object], Literal["fp8", "int8", "fp4"]] = {
        (8, "float"): "fp8",
        (8, "int"): "int8",
        (4, "float"): "fp4",
    }
    if (bits, kind) not in names:
        raise unsupported(f"weights with {kind}{bits} inputs (compressed-tensors)")
    strategy = str(settings.get("strategy") or "tensor")
    scope: Literal["tensor", "token", "group"] = "tensor"
    if strategy == "token":
        scope = "token"
    elif strategy in ("group", "tensor_group"):
        scope = "group"
    return Activations(
        dtype=names[bits, kind], scope=scope, is_dynamic=bool(settings.get("dynamic", False))
    )
