"""Reads a PEFT LoRA folder, checks it against the base, and hashes the bytes it read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from loramux.adapters.identity import Manifest, compute_cid, make_manifest
from loramux.adapters.peft.folder import open_folder
from loramux.adapters.peft.inspection import InspectedAdapter, Inspector
from loramux.adapters.peft.parts import AdapterParts, BaseWeights, ExtraTensor, LoraModule
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.adapters.peft.tokenizer_files import digest_tokenizer_files
from loramux.adapters.peft.types.configs import AdapterConfig
from loramux.adapters.values import RankMaxima, largest_of, rank_maxima
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo


@dataclass(frozen=True, slots=True, eq=False)
class CheckedAdapter:
    """An adapter that passed every check, with its tensors in memory."""

    cid: str
    manifest: Manifest
    path: Path
    config: AdapterConfig
    size_bytes: int
    """The size of the tensors that parts are made of in the file."""
    modules: tuple[LoraModule, ...]
    """One entry for each linear layer with low rank, in the order of the base."""
    warnings: tuple[str, ...]
    tensors_used: tuple[str, ...]
    tensors_unused: tuple[str, ...]
    extras: tuple[ExtraTensor, ...] = ()
    only_alone: str = ""


def read_adapter(
    folder: Path,
    base: BaseModelInfo,
    *,
    max_rank: int | None = None,
    strict_base: bool = False,
    base_weights: BaseWeights | None = None,
) -> CheckedAdapter:
    """Read, check and hash an adapter folder.

    Without `base_weights`, parts that are computed from them are not made.
    Raises AdapterNotFound, or AdapterRefused with the reason. It may run in any thread.
    """
    inspector = Inspector(base, max_rank=max_rank, strict_base=strict_base)
    with inspector.open(open_folder(Path(folder))) as (found, weights):
        loaded = weights.load()
    parts = make_parts(found, loaded.tensors, base_weights)
    modules, extras = parts.modules, parts.extras
    maxima = [largest_of(part) for part in extras]
    files = {WEIGHTS_NAME: loaded.digest, **digest_tokenizer_files(found.path)}
    manifest = make_manifest(found.config.canonical(), files)
    return CheckedAdapter(
        cid=compute_cid(manifest),
        manifest=manifest,
        path=found.path,
        config=found.config,
        size_bytes=found.size_bytes,
        modules=modules,
        warnings=(
            *found.warnings,
            *check_values(modules, [rank_maxima(m) for m in modules], extras=maxima),
        ),
        tensors_used=tuple(entry.name for entry in found.contents.used),
        tensors_unused=found.contents.unused,
        extras=extras,
        only_alone=found.only_alone,
    )


def make_parts(
    found: InspectedAdapter,
    tensors: Mapping[str, torch.Tensor],
    base_weights: BaseWeights | None,
) -> AdapterParts:
    """Make the parts of an inspected adapter from the tensors of its file.

    The tensors must be read before, unless `found.contents.are_views`. Raises AdapterRefused.
    """
    return found.contents.make_parts(tensors, base_weights)


def check_values(
    modules: Sequence[LoraModule], maxima: Sequence[RankMaxima], *, extras: Sequence[float] = ()
) -> tuple[str, ...]:
    """Refuses values that are not finite and adapters without effect; returns warnings.

    A module has an effect if scale * B @ A can be other than zero: a rank is nonzero in both A and
    B. All modules are checked at once, because an adapter may have hundreds. `extras`: the largest
    absolute value of each other part, which has an effect unless it is zero.
    """
    if not modules:
        if any(extras):
            return ()
        raise _no_effect("all its values are zero")
    a, b = (np.concatenate([getattr(found, half) for found in maxima]) for half in ("a", "b"))
    if not (np.isfinite(a) & np.isfinite(b)).all():
        _refuse_infinite(modules, maxima)
    starts = np.cumsum([0, *(len(found.a) for found in maxima[:-1])])
    effects = np.logical_or.reduceat((a > 0) & (b > 0), starts)
    acting = [bool(effect) and m.scale != 0 for m, effect in zip(modules, effects, strict=True)]
    idle = [m.target.path for m, acts in zip(modules, acting, strict=True) if not acts]
    if len(idle) == len(modules) and not any(extras):
        raise _no_effect("scale * B @ A is zero in every module")
    return (f"{len(idle)} modules have no effect: {name_some(idle)}.",) if idle else ()


def _no_effect(why: str) -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.NO_EFFECT,
        f"The adapter changes nothing: {why}.",
        fix="It seems untrained, or lora_alpha is 0; give the trained one.",
    )


def _refuse_infinite(modules: Sequence[LoraModule], maxima: Sequence[RankMaxima]) -> None:
    for module, found in zip(modules, maxima, strict=True):
        for half, largest in (("A", found.a), ("B", found.b)):
            if not np.isfinite(largest).all():
                raise AdapterRefused(
                    RefusalCode.NOT_FINITE,
                    f"{module.target.path} has NaN or infinite values in lora_{half}.",
                    fix="The training diverged; give an earlier checkpoint.",
                )
