"""Finds the modules of the base that a config targets, with rank and scale, by PEFT's rules."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from loramux.adapters.peft.config import ALL_LINEAR, PeftLoraConfig, TargetFields
from loramux.adapters.peft.patterns import first_matches
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.errors import AdapterRefused
from loramux.types.model import TEXT_PREFIX, TargetModule

# Without layers_pattern, the layer is the first number that follows a dotted name.
ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
NAMED_LAYER = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
MODULE_PATTERN = r"(.*\.)?({})$"
# A module that is saved, and the modules below it, take no LoRA.
EXCLUDED_BY_SAVING = r"(^|.*\.){}($|\..*)"
# From this many names on, PEFT abbreviates full paths to common suffixes before it matches.
PEFT_ABBREVIATES_FROM = 20

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """The rank and scale that the config gives one module of the base."""

    target: TargetModule
    rank: int
    alpha: float
    scale: float
    """The factor of B @ A."""


def plan_modules(
    config: PeftLoraConfig,
    targets: Sequence[TargetModule],
    *,
    embedding: TargetModule | None = None,
    head: TargetModule | None = None,
    are_tied: bool = False,
    prefixes: Sequence[str] = (TEXT_PREFIX,),
) -> tuple[ModulePlan, ...]:
    """Return the plan of each targeted module, in the order of the base.

    "all-linear" leaves out the embedding and the head. Where they are tied and ensure_weight_tying
    is set, PEFT adapts both or none. prefixes: of the base; patterns of the config are matched
    with the first under which they name a layer.
    """
    check_abbreviation(config, targets)
    prefix = next(
        (one for one in prefixes if targeted_paths(config, _spelled(targets, one))), prefixes[0]
    )
    vocabulary = [module for module in (embedding, head) if module is not None]
    paths = _spelled(targets, prefix)
    outside = _spelled(vocabulary, prefix)
    wanted = targeted_paths(config, without_saved(config.modules_to_save, paths))
    if config.target_modules != ALL_LINEAR:
        found = targeted_paths(config, without_saved(config.modules_to_save, outside))
        if found and config.ensure_weight_tying and are_tied:
            found = set(outside)
        wanted |= found
    known = zip([*targets, *vocabulary], [*paths, *outside], strict=True)
    chosen = [target for target, path in known if path in wanted]
    if not chosen:
        raise AdapterRefused(
            RefusalCode.NO_TARGETS,
            f"target_modules {abbreviate(config.target_modules)} names no layer of this base.",
            fix="Serve the adapter on the base that it was trained on.",
        )
    check_not_saved(config, chosen)
    paths = _spelled(chosen, prefix)
    ranks = values_by_pattern("rank_pattern", config.rank_pattern, paths)
    alphas = values_by_pattern("alpha_pattern", config.alpha_pattern, paths)
    return tuple(
        plan_module(
            config,
            target,
            rank=config.r if rank is None else rank,
            alpha=config.lora_alpha if alpha is None else alpha,
        )
        for target, rank, alpha in zip(chosen, ranks, alphas, strict=True)
    )


def spelled_path(path: str, prefix: str) -> str:
    """Return a module path of the text model under another prefix of the base."""
    if not path.startswith(TEXT_PREFIX):
        return path
    return prefix + path.removeprefix(TEXT_PREFIX)


def _spelled(targets: Sequence[TargetModule], prefix: str) -> list[str]:
    return [spelled_path(target.path, prefix) for target in targets]


def check_not_saved(config: PeftLoraConfig, chosen: Sequence[TargetModule]) -> None:
    """Refuses a LoRA inside a saved module, which PEFT would train as a copy of both."""
    both = [target.path for target in chosen if is_saved(config.modules_to_save, target.path)]
    if both:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"target_modules and modules_to_save both name {name_some(both)}.",
            fix="Name whole parts of the module path in modules_to_save.",
        )


def plan_module(
    config: PeftLoraConfig, target: TargetModule, *, rank: int, alpha: float
) -> ModulePlan:
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return ModulePlan(target=target, rank=rank, alpha=alpha, scale=scale)


def is_saved(names: Sequence[str], path: str) -> bool:
    """Whether modules_to_save names a module or one that it is in; PEFT compares the ends."""
    parts = path.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(module.endswith(name) for name in names for module in above)


def without_saved(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the paths that may take a LoRA."""
    if not names:
        return list(paths)
    hits = first_matches("modules_to_save", names, paths, template=EXCLUDED_BY_SAVING)
    return [path for path, hit in zip(paths, hits, strict=True) if hit is None]


def targeted_paths(config: TargetFields, paths: Sequence[str]) -> set[str]:
    excluded = matching_paths("exclude_modules", config.exclude_modules, paths)
    left = [path for path in paths if path not in excluded]
    if config.target_modules == ALL_LINEAR:
        return set(left)
    wanted = matching_paths("target_modules", config.target_modules, left)
    if not config.layers_to_transform:
        return wanted
    # A module named by its full path is targeted in any layer.
    whole = wanted.intersection(config.target_modules)
    return whole | in_chosen_layers(config, sorted(wanted - whole))


def matching_paths(field: str, names: tuple[str, ...] | str, paths: Sequence[str]) -> set[str]:
    if not names:
        return set()
    if isinstance(names, str):
        hits = first_matches(field, [names], paths, whole=True)
        return {path for path, hit in zip(paths, hits, strict=True) if hit is not None}
    return {path for path in paths if not suffixes(path).isdisjoint(names)}


@lru_cache(maxsize=16_384)
def suffixes(path: str) -> frozenset[str]:
    """Return all dotted suffixes of a path: a.b.c gives a.b.c, b.c and c."""
    parts = path.split(".")
    return frozenset(".".join(parts[start:]) for start in range(len(parts)))


def in_chosen_layers(config: TargetFields, paths: Sequence[str]) -> set[str]:
    chosen = set(config.layers_to_transform)
    return {
        path
        for path, index in zip(paths, layer_numbers(config, paths), strict=True)
        if index is not None and int(index) in chosen
    }


def layer_numbers(config: TargetFields, paths: Sequence[str]) -> list[str | None]:
    if not config.layers_pattern:
        matches = [ANY_LAYER.match(path) for path in paths]
        return [match["idx"] if match else None for match in matches]
    hits = first_matches("layers_pattern", config.layers_pattern, paths, template=NAMED_LAYER)
    return [hit[1] if hit else None for hit in hits]


def values_by_pattern(
    field: str, pairs: Sequence[tuple[str, Value]], paths: Sequence[str]
) -> list[Value | None]:
    """Return, for each path, the value of the first pattern that matches its end."""
    patterns = [pattern for pattern, _ in pairs]
    hits = first_matches(field, patterns, paths, template=MODULE_PATTERN)
    return [pairs[hit[0]][1] if hit else None for hit in hits]


def check_abbreviation(config: TargetFields, targets: Sequence[TargetModule]) -> None:
    """Refuses full paths beside layers_to_transform where PEFT may abbreviate them.

    PEFT applies layers_to_transform to abbreviated paths and not to full ones, and the config does
    not say which of the two it matched.
    """
    names = config.target_modules
    if (
        isinstance(names, str)
        or len(names) < PEFT_ABBREVIATES_FROM
        or not config.layers_to_transform
    ):
        return
    whole = sorted({target.path for target in targets}.intersection(names))
    if whole:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"target_modules names whole paths ({name_some(whole)}) while layers_to_transform "
            "chooses layers.",
            fix="Remove layers_to_transform, or name the modules by their last name part.",
        )


def abbreviate(names: tuple[str, ...] | str) -> str:
    return repr(names[:200]) if isinstance(names, str) else f"[{name_some(list(names), limit=8)}]"
