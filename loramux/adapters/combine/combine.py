"""Combines whole adapters by a recipe, and writes the result as a PEFT folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.adapters.combine.methods import ModulePart, combine_module
from loramux.adapters.peft.config import PeftLoraConfig
from loramux.adapters.peft.folder import short_base_name
from loramux.adapters.peft.parts import LoraModule
from loramux.adapters.peft.reader import CheckedAdapter
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.types.configs import lora_config
from loramux.adapters.peft.writer import (
    WrittenModule,
    lora_fields,
    lora_tensors,
    write_files,
)
from loramux.adapters.recipe import ONLY_ALONE, RECIPE_KEY, UNEQUAL_RANKS, Recipe
from loramux.errors import AdapterRefused

RECIPE_NAME = "loramux_recipe.json"

Progress = Callable[[int, int], None]
"""Receives the number of combined modules and the number of all modules."""


@dataclass(frozen=True, slots=True, eq=False)
class CombinedAdapter:
    recipe: Recipe
    configs: tuple[PeftLoraConfig, ...]
    """The configs of the parts, in the order of the recipe."""
    modules: tuple[WrittenModule, ...]
    known_paths: frozenset[str]
    """All modules of the parts; those whose combination is zero are not in `modules`."""

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def size_bytes(self) -> int:
        tensors = [tensor for module in self.modules for tensor in (module.a, module.b)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def combine(
    recipe: Recipe,
    adapters: Mapping[str, CheckedAdapter],
    *,
    names: Mapping[str, str] | None = None,
    any_base: bool = False,
    progress: Progress = lambda done, total: None,
) -> CombinedAdapter:
    """Combine the adapters of a recipe, given by CID.

    Raises AdapterRefused if they cannot be combined by the method. `names` are shown in messages
    instead of CIDs; with `any_base` the parts may record different bases.
    """
    by_path, configs = check_parts(recipe, adapters, names=names, any_base=any_base)
    svd_rank = recipe.svd_rank or max(_largest_rank(config) for config in configs)
    modules = []
    for done, (path, found) in enumerate(by_path.items()):
        progress(done, len(by_path))
        modules.append(_combine_path(recipe, path, found, svd_rank))
    progress(len(by_path), len(by_path))
    used = _without_zero_modules(recipe, modules)
    return CombinedAdapter(recipe, configs, used, frozenset(by_path))


def check_parts(
    recipe: Recipe,
    adapters: Mapping[str, CheckedAdapter],
    *,
    names: Mapping[str, str] | None = None,
    any_base: bool = False,
) -> tuple[dict[str, dict[int, LoraModule]], tuple[PeftLoraConfig, ...]]:
    """Return the modules of all parts by path, and their configs.

    Refuses what combine() would refuse of them.
    """
    parts = [adapters[part.cid] for part in recipe.parts]
    shown = [(names or {}).get(part.cid, part.cid) for part in recipe.parts]
    configs = tuple(lora_config(part.config, name) for part, name in zip(parts, shown, strict=True))
    check_combinable(parts, shown)
    if not any_base:
        check_bases(parts, shown)
    by_path = _modules_by_path(parts)
    for path, found in by_path.items():
        check_shapes(path, found, shown)
        if recipe.method.needs_equal_ranks:
            check_ranks(recipe, path, found, shown)
    return by_path, configs


def write_combined(
    folder: Path, combined: CombinedAdapter, *, names: Mapping[str, str] | None = None
) -> None:
    """Write the two files of PEFT and the recipe into an existing folder.

    The recipe is part of the weights file too, so that it stays with the adapter in every store.
    `names` (by CID) are recorded beside it for the reader, and are not part of the identity.
    """
    recipe = combined.recipe
    fields = lora_fields(combined.modules, combined.configs, known_paths=combined.known_paths)
    metadata = {RECIPE_KEY: recipe.encode().decode("utf-8")}
    write_files(folder, fields, lora_tensors(combined.modules), metadata)
    shown = recipe.to_dict()
    shown["parts"] = [
        {"cid": part.cid, "weight": part.weight, "name": (names or {}).get(part.cid)}
        for part in recipe.parts
    ]
    text = json.dumps({"cid": recipe.cid, **shown}, indent=2, ensure_ascii=False)
    (folder / RECIPE_NAME).write_text(text + "\n", encoding="utf-8")


def _modules_by_path(parts: Sequence[CheckedAdapter]) -> dict[str, dict[int, LoraModule]]:
    """Return the modules of all parts: for each path, the index of each part that has it."""
    found: dict[str, dict[int, LoraModule]] = {}
    for index, part in enumerate(parts):
        for module in part.modules:
            found.setdefault(module.target.path, {})[index] = module
    return found


def _combine_path(
    recipe: Recipe, path: str, found: Mapping[int, LoraModule], svd_rank: int
) -> WrittenModule:
    parts = [
        ModulePart(
            cid=recipe.parts[index].cid,
            weight=recipe.parts[index].weight,
            scale=module.scale,
            a=module.a,
            b=module.b,
        )
        for index, module in found.items()
    ]
    factors = combine_module(recipe, path, parts, svd_rank=svd_rank)
    dtype = getattr(torch, recipe.dtype)
    a, b = factors.a.to(dtype), factors.b.to(dtype)
    if not torch.isfinite(a).all() or not torch.isfinite(b).all():
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"The combination of {path} has values that are too large for {recipe.dtype}.",
            fix="Take smaller weights, or dtype float32.",
        )
    return WrittenModule(path, a, b, scale=1.0)


def _without_zero_modules(
    recipe: Recipe, modules: Sequence[WrittenModule]
) -> tuple[WrittenModule, ...]:
    used = tuple(module for module in modules if module.a.any() and module.b.any())
    if not used:
        raise AdapterRefused(
            RefusalCode.NO_EFFECT,
            f"The combination by {recipe.method.name} changes nothing: all its values are 0.",
            fix="Take a larger density, or other weights.",
        )
    return used


def _largest_rank(config: PeftLoraConfig) -> int:
    """Return the rank that PEFT takes for an adapter, whether or not a module has it."""
    return max([config.r, *(rank for _, rank in config.rank_pattern)])


def check_combinable(parts: Sequence[CheckedAdapter], names: Sequence[str]) -> None:
    """Refuses adapters whose effect is not a sum of deltas."""
    for part, name in zip(parts, names, strict=True):
        reason = part.only_alone or part.config.only_alone
        if not reason and part.extras:
            reason = "it changes more than the low rank of the decoder's linear layers"
        if reason:
            raise AdapterRefused(
                ONLY_ALONE,
                f"{name} cannot be combined with other adapters: {reason}.",
                fix="Leave it out, and name it alone in a request.",
            )


def check_bases(parts: Sequence[CheckedAdapter], names: Sequence[str]) -> None:
    """Refuses adapters whose configs record different bases."""
    seen: dict[str, str] = {}
    for part, name in zip(parts, names, strict=True):
        if part.config.base_model_name is not None:
            seen.setdefault(short_base_name(part.config.base_model_name), name)
    if len(seen) > 1:
        found = " and ".join(f"{name} on {base[:200]!r}" for base, name in list(seen.items())[:2])
        raise AdapterRefused(
            RefusalCode.OTHER_BASE,
            f"The adapters were trained on different bases: {found}.",
            fix="Combine adapters of one base. If both names mean the same base, allow other base "
            "names (loramux merge --any-base).",
        )


def check_shapes(path: str, found: Mapping[int, LoraModule], names: Sequence[str]) -> None:
    shapes = {
        (module.target.in_features, module.target.out_features): names[index]
        for index, module in found.items()
    }
    if len(shapes) > 1:
        said = ", ".join(
            f"{given} and {taken} in {name}" for (given, taken), name in shapes.items()
        )
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"{path} takes and gives different numbers of features: {said}.",
            fix="Combine adapters that were trained on the same base.",
        )


def check_ranks(
    recipe: Recipe, path: str, found: Mapping[int, LoraModule], names: Sequence[str]
) -> None:
    ranks = {module.rank: names[index] for index, module in found.items()}
    if len(ranks) > 1:
        said = " and ".join(f"{rank} in {name}" for rank, name in ranks.items())
        raise AdapterRefused(
            UNEQUAL_RANKS,
            f"{recipe.method.name} adds A and B of the adapters element by element, so it needs "
            f"equal ranks; {path} has rank {said}.",
            fix="Use cat, which is exact for any ranks, or svd or a method that ends in _svd.",
        )
