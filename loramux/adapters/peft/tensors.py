"""Checks the names and shapes in an adapter's weights file against its config and the base."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.adapters.packed.extras import ExtraSpec
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, LoraModule
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME, TensorEntry
from loramux.adapters.peft.targets import HEAD_AND_EMBEDDING, ModulePlan
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

if TYPE_CHECKING:
    import torch

LORA_NAME = re.compile(
    r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight"
)
UNUSED_NAME = re.compile(r".+\.lora_velora_embed(?:\.default)?")
LAYER_NUMBER = re.compile(r"(?:.*?\.)?layers\.(\d+)\.")
READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OTHER_BASE_FIX = "Serve the adapter on the base that it was trained on."

# Kinds of tensors other than lora_A and lora_B; the first pattern found in a name decides.
FOREIGN_KINDS: tuple[tuple[re.Pattern[str], RefusalCode, str, str], ...] = (
    (
        re.compile(r"\.lora_embedding_[AB]"),
        RefusalCode.EMBEDDING_LORA,
        "a LoRA of the embedding, which is not supported yet",
        "Train the adapter on the attention and MLP layers only.",
    ),
    (
        re.compile(r"\.lora_magnitude_vector"),
        RefusalCode.DORA_TENSORS,
        "DoRA magnitudes, though the config does not set use_dora",
        "Train the adapter with use_dora=False.",
    ),
    (
        re.compile(r"\.bias$"),
        RefusalCode.BIAS_TENSORS,
        "trained bias terms, which are not supported yet",
        "Train the adapter with bias='none' and lora_bias=False.",
    ),
    (
        re.compile(
            r"\.modules_to_save\.|\.base_layer\.|trainable_tokens|^(?!.*\.lora_).*\.weight$"
        ),
        RefusalCode.FULL_WEIGHTS,
        "whole weights of the base beside the LoRA",
        "Save the adapter with modules_to_save=None and save_embedding_layers=False.",
    ),
)


@dataclass(frozen=True, slots=True)
class Pair:
    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True, slots=True)
class MatchedTensors:
    """The LoRA tensors of each module: `pairs[i]` belongs to `plans[i]`."""

    plans: tuple[ModulePlan, ...]
    pairs: tuple[Pair, ...]
    unused: tuple[str, ...]
    extras: tuple[ExtraSpec, ...] = ()
    only_alone: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        return {(plan.target.layer, plan.target.projection): plan.rank for plan in self.plans}

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for pair in self.pairs for entry in (pair.a, pair.b))

    @property
    def are_views(self) -> bool:
        return not self.extras

    def make_parts(
        self, tensors: Mapping[str, torch.Tensor], base_weights: BaseWeights | None
    ) -> AdapterParts:
        modules = (
            LoraModule(
                target=plan.target,
                rank=plan.rank,
                alpha=plan.alpha,
                scale=plan.scale,
                a=tensors[pair.a.name],
                b=tensors[pair.b.name],
            )
            for plan, pair in zip(self.plans, self.pairs, strict=True)
        )
        return AdapterParts(tuple(modules))


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The modules of the base that a LoRA config targets."""

    modules: tuple[ModulePlan, ...]
    base: BaseModelInfo

    def match(self, entries: Sequence[TensorEntry], *, max_rank: int | None) -> MatchedTensors:
        return match_tensors(entries, self.modules, self.base, max_rank=max_rank)


def match_tensors(
    entries: Sequence[TensorEntry],
    plans: Sequence[ModulePlan],
    base: BaseModelInfo,
    *,
    max_rank: int | None,
) -> MatchedTensors:
    unused = [entry for entry in entries if UNUSED_NAME.fullmatch(entry.name)]
    pairs = pair_up(entry for entry in entries if not UNUSED_NAME.fullmatch(entry.name))
    targets = {target.path: target for target in base.targets}
    check_shapes(pairs, targets)
    check_modules_exist(pairs, targets, base)
    check_same_modules(pairs, plans)
    for plan in plans:
        check_rank(pairs[plan.target.path], plan, max_rank)
    return MatchedTensors(
        plans=tuple(plans),
        pairs=tuple(pairs[plan.target.path] for plan in plans),
        unused=tuple(entry.name for entry in unused),
    )


def pair_up(entries: Iterable[TensorEntry]) -> dict[str, Pair]:
    halves: dict[tuple[str, str], TensorEntry] = {}
    foreign: list[str] = []
    for entry in entries:
        match = LORA_NAME.fullmatch(entry.name)
        if match is None:
            foreign.append(entry.name)
        elif other := halves.get((match["path"], match["half"])):
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{other.name} and {entry.name} are the same tensor under two names.",
                fix="Save the adapter again with one adapter name.",
            )
        else:
            halves[match["path"], match["half"]] = entry
    if foreign:
        raise explain_foreign(sorted(foreign))
    if not halves:
        raise AdapterRefused(
            RefusalCode.NO_TENSORS, f"{WEIGHTS_NAME} has no tensors.", fix="Save it again."
        )
    check_complete(halves)
    return {path: Pair(halves[path, "A"], halves[path, "B"]) for path, _ in halves}


def explain_foreign(names: list[str]) -> AdapterRefused:
    for pattern, code, what, fix in FOREIGN_KINDS:
        found = [name for name in names if pattern.search(name)]
        if found:
            return AdapterRefused(code, f"The file holds {what}: {name_some(found)}.", fix=fix)
    return AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        f"The file holds tensors of unknown meaning: {name_some(names)}.",
        fix="PEFT's names look like base_model.model.<module>.lora_A.weight; `loramux convert` "
        "translates those of older tools.",
    )


def check_complete(halves: dict[tuple[str, str], TensorEntry]) -> None:
    lone = [
        f"{path} has no lora_{other}"
        for path, half in halves
        if (path, other := "B" if half == "A" else "A") not in halves
    ]
    if lone:
        raise AdapterRefused(
            RefusalCode.INCOMPLETE_PAIR, f"{name_some(sorted(lone))}.", fix="Save it again."
        )


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
    pairs: dict[str, Pair], targets: dict[str, TargetModule], base: BaseModelInfo
) -> None:
    unknown = sorted(pairs.keys() - targets.keys())
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
    outside = [path for path in unknown if path in HEAD_AND_EMBEDDING]
    if outside:
        raise AdapterRefused(
            RefusalCode.UNSUPPORTED_TARGET,
            f"The file holds a LoRA of {' and '.join(outside)}, which is not supported yet.",
            fix="Train the adapter on the attention and MLP layers only.",
        )
    raise AdapterRefused(
        RefusalCode.UNKNOWN_TENSORS,
        f"The file holds tensors for modules that this base lacks: {name_some(unknown)}.",
        fix=OTHER_BASE_FIX,
    )


def check_same_modules(pairs: dict[str, Pair], plans: Sequence[ModulePlan]) -> None:
    planned = {plan.target.path for plan in plans}
    if untargeted := sorted(pairs.keys() - planned):
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
