"""Checks the names and shapes of low-rank tensors against the config and the base."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loramux.adapters.peft.names import FileTensors, Role
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.targets import ModulePlan
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

LAYER_NUMBER = re.compile(r"(?:.*?\.)?layers\.(\d+)\.")
READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OTHER_BASE_FIX = "Serve the adapter on the base that it was trained on."


@dataclass(frozen=True, slots=True)
class Pair:
    a: TensorEntry
    b: TensorEntry


def pair_up(
    file: FileTensors, roles: tuple[Role, Role] = (Role.LORA_A, Role.LORA_B)
) -> dict[str, Pair]:
    """Return A and B by module path, in the order of the file."""
    a, b = (file.of(role) for role in roles)
    lone = [
        f"{path} has no {other.name.lower()}"
        for have, missing, other in ((a, b, roles[1]), (b, a, roles[0]))
        for path in have
        if path not in missing
    ]
    if lone:
        raise AdapterRefused(
            RefusalCode.INCOMPLETE_PAIR, f"{name_some(sorted(lone))}.", fix="Save it again."
        )
    return {path: Pair(entry, b[path]) for path, entry in a.items()}


def check_shapes(pairs: dict[str, Pair], targets: dict[str, TargetModule]) -> None:
    for path, pair in pairs.items():
        for entry in (pair.a, pair.b):
            if len(entry.shape) != 2 or 0 in entry.shape:
                raise AdapterRefused(
                    RefusalCode.EMPTY_TENSOR,
                    f"{entry.name} has shape {list(entry.shape)}, which is not a matrix.",
                    fix="Gather the shards (ZeRO-3, FSDP) before save_pretrained.",
                )
        target = targets.get(path)
        if target is not None:
            check_shape(pair, target)


def check_shape(pair: Pair, target: TargetModule) -> None:
    (a_rank, a_in), (b_out, b_rank) = pair.a.shape, pair.b.shape
    if a_in != target.in_features or b_out != target.out_features:
        reads_hidden = target.projection in READS_HIDDEN
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"{target.path} takes {target.in_features} and gives {target.out_features} features "
            f"in this base, {a_in} and {b_out} in the adapter, which seems to be for a model "
            f"with hidden size {a_in if reads_hidden else b_out}.",
            fix=OTHER_BASE_FIX,
        )
    if a_rank != b_rank:
        raise AdapterRefused(
            RefusalCode.WRONG_RANK,
            f"{target.path} has rank {a_rank} in lora_A and {b_rank} in lora_B.",
            fix="Save the adapter again.",
        )


def check_modules_exist(
    paths: Collection[str], known: Collection[str], base: BaseModelInfo
) -> None:
    """Refuses tensors for modules that the base lacks."""
    unknown = sorted(set(paths) - set(known))
    if not unknown:
        return
    numbers = [int(match[1]) for path in unknown if (match := LAYER_NUMBER.match(path))]
    if max(numbers, default=0) >= base.num_layers:
        raise AdapterRefused(
            RefusalCode.LAYER_OUT_OF_RANGE,
            f"The adapter changes layer {max(numbers)}; this base has layers 0 to "
            f"{base.num_layers - 1}.",
            fix=OTHER_BASE_FIX,
        )
    raise AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        f"The file holds tensors for modules that this base lacks: {name_some(unknown)}.",
        fix=OTHER_BASE_FIX,
    )


def check_same_modules(pairs: Collection[str], plans: Sequence[ModulePlan]) -> None:
    planned = {plan.target.path for plan in plans}
    if untargeted := sorted(set(pairs) - planned):
        raise AdapterRefused(
            RefusalCode.UNTARGETED_TENSORS,
            f"The file holds tensors for modules that the config does not target: "
            f"{name_some(untargeted)}.",
            fix="Make target_modules, exclude_modules and layers_to_transform fit the file.",
        )
    if missing := [plan.target.path for plan in plans if plan.target.path not in pairs]:
        raise AdapterRefused(
            RefusalCode.MISSING_TENSORS,
            f"The config targets modules that the file has no tensors for: {name_some(missing)}.",
            fix="Make target_modules, exclude_modules and layers_to_transform fit the file.",
        )


def check_rank(pair: Pair, plan: ModulePlan, max_rank: int | None) -> None:
    found = pair.a.shape[0]
    if found != plan.rank:
        raise AdapterRefused(
            RefusalCode.WRONG_RANK,
            f"{plan.target.path} has rank {found} in the file and {plan.rank} in the config.",
            fix="Correct r or rank_pattern in adapter_config.json.",
        )
    if max_rank is not None and found > max_rank:
        raise AdapterRefused(
            RefusalCode.RANK_OVER_CAP,
            f"{plan.target.path} has rank {found}; this server takes at most {max_rank}.",
            fix="Raise the server's rank limit, or train with a smaller rank.",
        )
