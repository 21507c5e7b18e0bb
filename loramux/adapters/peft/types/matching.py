"""Compares the tensors of a file with those that the config of a PEFT type asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loramux.adapters.peft.config import ALL_LINEAR, TargetFields
from loramux.adapters.peft.names import text_tensor_name
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, TensorEntry
from loramux.adapters.peft.targets import (
    abbreviate,
    check_abbreviation,
    spelled_path,
    targeted_paths,
)
from loramux.adapters.peft.tensors import LAYER_NUMBER, OTHER_BASE_FIX
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

OUTSIDE_LAYERS = ("lm_head", "model.embed_tokens")
MODULE_PREFIX = "base_model.model."
ADAPTER_NAME = re.compile(r"\.default(?=$|\.weight$)")
FIT_FIX = "Make target_modules, exclude_modules and layers_to_transform fit the file."

Shape = tuple[int, ...]

# Tensors that no type here has; the first pattern found in a name decides.
FOREIGN_KINDS: tuple[tuple[re.Pattern[str], RefusalCode, str, str], ...] = (
    (
        re.compile(r"\.bias$"),
        RefusalCode.BIAS_TENSORS,
        "trained bias terms of the base",
        "Train the adapter with bias='none'.",
    ),
    (
        re.compile(r"\.modules_to_save\.|\.base_layer\.|trainable_tokens|(?:lm_head|embed_tokens)"),
        RefusalCode.FULL_WEIGHTS,
        "whole weights of the base",
        "Save the adapter with modules_to_save=None and save_embedding_layers=False.",
    ),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that the config asks for."""

    path: str
    """The path of its module; empty for tensors that modules share."""
    shape: Shape


def linear_targets(config: TargetFields, base: BaseModelInfo) -> tuple[TargetModule, ...]:
    """Return the linear layers that a config targets, in the order of the base."""
    check_abbreviation(config, base.targets)
    if config.target_modules != ALL_LINEAR and (
        outside := sorted(targeted_paths(config, OUTSIDE_LAYERS))
    ):
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"target_modules reaches {' and '.join(outside)}, where this PEFT type is not "
            "supported.",
            fix="Train the adapter on the attention and MLP layers only.",
        )
    for prefix in base.path_prefixes:
        spelled = {spelled_path(target.path, prefix): target for target in base.targets}
        wanted = targeted_paths(config, list(spelled))
        if wanted:
            return tuple(target for path, target in spelled.items() if path in wanted)
    raise no_targets(config)


def no_targets(config: TargetFields) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.NO_TARGETS,
        f"target_modules {abbreviate(config.target_modules)} names no module of this base that "
        "the PEFT type can change.",
        fix=OTHER_BASE_FIX,
    )


def match_entries(
    entries: Sequence[TensorEntry], expected: Mapping[str, Expected], base: BaseModelInfo
) -> dict[str, TensorEntry]:
    """Return the tensor of each expected name; every tensor of the file must be expected."""
    found: dict[str, TensorEntry] = {}
    for entry in entries:
        text_name = text_tensor_name(entry.name)
        if text_name is None:  # Text does not pass through the image encoder.
            continue
        name = ADAPTER_NAME.sub("", text_name)
        if other := found.get(name):
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{other.name} and {entry.name} are the same tensor under two names.",
                fix="Save the adapter again with one adapter name.",
            )
        found[name] = entry
    if not found:
        raise AdapterRefused(
            RefusalCode.NO_TENSORS, f"{WEIGHTS_NAME} has no tensors.", fix="Save it again."
        )
    for name in found.keys() & expected.keys():
        check_shape(found[name], expected[name])
    if unexpected := sorted(found.keys() - expected.keys()):
        raise explain_unexpected(unexpected, expected, base)
    if missing := [name for name in expected if name not in found]:
        raise explain_missing(missing, found, expected)
    return found


def check_shape(entry: TensorEntry, expected: Expected) -> None:
    if entry.shape == expected.shape:
        return
    if 0 in entry.shape:
        raise AdapterRefused(
            RefusalCode.EMPTY_TENSOR,
            f"{entry.name} has shape {list(entry.shape)}, which is empty.",
            fix="Gather the shards (ZeRO-3, FSDP) before save_pretrained.",
        )
    raise AdapterRefused(
        RefusalCode.WRONG_SHAPE,
        f"{entry.name} has shape {list(entry.shape)} in the file; the config and this base ask "
        f"for {list(expected.shape)}.",
        fix=f"{OTHER_BASE_FIX} If it is this base, correct adapter_config.json.",
    )


def explain_unexpected(
    names: list[str], expected: Mapping[str, Expected], base: BaseModelInfo
) -> AdapterRefused:
    for pattern, code, what, fix in FOREIGN_KINDS:
        if kind := [name for name in names if pattern.search(name)]:
            return AdapterRefused(code, f"The file holds {what}: {name_some(kind)}.", fix=fix)
    numbers = [
        int(match[1])
        for name in names
        if (match := LAYER_NUMBER.match(name.removeprefix(MODULE_PREFIX)))
    ]
    if max(numbers, default=0) >= base.num_layers:
        return AdapterRefused(
            RefusalCode.LAYER_OUT_OF_RANGE,
            f"The adapter changes layer {max(numbers)}; this base has layers 0 to "
            f"{base.num_layers - 1}.",
            fix=OTHER_BASE_FIX,
        )
    parts = {name.removeprefix(MODULE_PREFIX + e.path) for name, e in expected.items() if e.path}
    paths = {target.path for target in base.targets}
    untargeted = [
        name
        for name in names
        for part in parts
        if name.removesuffix(part).removeprefix(MODULE_PREFIX) in paths
    ]
    if untargeted:
        return AdapterRefused(
            RefusalCode.UNTARGETED_TENSORS,
            "The file holds tensors for modules that the config does not target: "
            f"{name_some(untargeted)}.",
            fix=FIT_FIX,
        )
    return AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        "The file holds tensors that this PEFT type does not have on this base: "
        f"{name_some(names)}.",
        fix=OTHER_BASE_FIX,
    )


def explain_missing(
    missing: list[str], found: Mapping[str, TensorEntry], expected: Mapping[str, Expected]
) -> AdapterRefused:
    begun = {expected[name].path for name in found}
    partial = [name for name in missing if not expected[name].path or expected[name].path in begun]
    if partial:
        return AdapterRefused(
            RefusalCode.INCOMPLETE_PAIR,
            f"The file lacks {name_some(partial)}, which belongs to tensors that it holds.",
            fix="Save it again, with the config that it was trained with.",
        )
    return AdapterRefused(
        RefusalCode.MISSING_TENSORS,
        f"The config targets modules that the file has no tensors for: {name_some(missing)}.",
        fix=FIT_FIX,
    )
