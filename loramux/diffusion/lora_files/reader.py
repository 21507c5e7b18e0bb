"""Reads an adapter of an image model strictly: every tensor is used, or the file is refused.

The pipeline is only looked at: names and shapes come from its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.images.keys import LOHA, LOKR, Role, split_key
from loramux.adapters.images.origin import trigger_words
from loramux.adapters.images.refusals import ImageRefusal, refuse_unserved
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.diffusion.adapter import ImageAdapter, Kronecker, LowRank, ModuleDelta
from loramux.diffusion.dora import dora_rows
from loramux.diffusion.lora_files.content import FileContent, read_file
from loramux.diffusion.lora_files.methods import (
    KroneckerFactors,
    Pair,
    magnitude,
    read_factors,
    wrong_shape,
)
from loramux.diffusion.lora_files.names import Named, PipelineNames
from loramux.diffusion.lora_files.scales import LoraSettings, parse_settings, settings_in_header
from loramux.diffusion.lora_files.unknown import refuse_unknown
from loramux.errors import AdapterRefused

_BESIDE = (Role.ALPHA, Role.DORA, Role.MAGNITUDE)
_DIFFERENCES = {Role.DIFF, Role.DIFF_BIAS}
_ROUNDING = 1e-6
_Groups = dict[str, dict[Role, Tensor]]


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What a file contains, for its owner."""

    path: Path
    cid: str
    formats: tuple[str, ...]
    """How the file names its modules, most used first."""
    method: str
    num_modules: Mapping[str, int]
    """By component."""
    ranks: Mapping[int, int]
    """Rank -> number of modules."""
    num_bytes: int
    trigger_words: tuple[str, ...]


def read_adapter(place: Path, names: PipelineNames) -> tuple[ImageAdapter, AdapterReport]:
    """Read a file or a folder; raise AdapterRefused with the reason and the fix."""
    content = read_file(place)
    groups = _group(content, names)
    settings = _settings(content, names)
    _check_dora(groups, names, settings)
    made: dict[str, dict[str, ModuleDelta]] = {}
    styles: Counter[str] = Counter()
    for name, parts in groups.items():
        named = names.find(name)
        assert named is not None
        styles[named.style] += 1
        for path, pair in _deltas(name, named, parts, names, settings.get(named.component)):
            modules = made.setdefault(named.component, {})
            if path in modules and not _is_same(modules[path], pair):
                raise AdapterRefused(
                    RefusalCode.DUPLICATE_TENSORS,
                    f"The file changes {named.component}.{path} twice, the second time as {name}.",
                    fix="Save the adapter again.",
                )
            modules[path] = pair
    adapter = ImageAdapter(cid=content.cid, components=made)
    _check_effect(adapter, groups, settings)
    return adapter, _report(content, adapter, styles, groups)


def _group(content: FileContent, names: PipelineNames) -> _Groups:
    """Group the tensors by module; refuse what has no place in the pipeline."""
    groups: _Groups = {}
    unknown: dict[str, dict[str, Tensor]] = {}
    for key, tensor in content.tensors.items():
        found = split_key(key)
        name, role = found or (key, None)
        if role is not None:
            refuse_unserved(key, role)
        if role is None or (names.find(name) is None and not names.is_ambiguous(name)):
            unknown.setdefault(name, {})[key] = tensor
            continue
        if names.is_ambiguous(name):
            raise AdapterRefused(
                ImageRefusal.AMBIGUOUS_NAME,
                f"{key} could be several modules of this model.",
                fix="Save the adapter with the names of diffusers.",
            )
        parts = groups.setdefault(name, {})
        if role in parts:
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{name} has two tensors for {role}.",
                fix="Save the adapter again.",
            )
        parts[role] = tensor.float()
    _refuse_unknown(unknown, content, names)
    if not content.tensors:
        raise AdapterRefused(
            RefusalCode.NO_TENSORS, f"{content.path.name} has no tensors.", fix="Save it again."
        )
    for name, parts in list(groups.items()):
        if parts.keys() <= _DIFFERENCES and not any(bool(part.any()) for part in parts.values()):
            del groups[name]
    broken = [
        f"{name} ({role})"
        for name, parts in groups.items()
        for role, tensor in parts.items()
        if not bool(torch.isfinite(tensor).all())
    ]
    if broken:
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"Tensors have NaN or infinite values: {name_some(broken)}.",
            fix="Train it again with a lower learning rate.",
        )
    return groups


def _refuse_unknown(
    unknown: Mapping[str, Mapping[str, Tensor]], content: FileContent, names: PipelineNames
) -> None:
    """Refuses tensors without a place in the pipeline, unless they are zero and so change nothing.

    Extracted LoRA files have such zeros for norms and embeddings.
    """
    lost: list[str] = []
    for tensors in unknown.values():
        values = [tensor for key, tensor in tensors.items() if not key.endswith(".alpha")]
        if not values or any(bool(tensor.float().any()) for tensor in values):
            lost += tensors
    if lost:
        refuse_unknown(lost, len(content.tensors), names)


def _settings(content: FileContent, names: PipelineNames) -> Mapping[str, LoraSettings]:
    if content.config is not None:
        paths = names.targets[names.denoiser]
        return {names.denoiser: parse_settings(content.config, paths, "adapter_config.json")}
    return settings_in_header(content.metadata, names.targets)


def _check_dora(
    groups: _Groups, names: PipelineNames, settings: Mapping[str, LoraSettings]
) -> None:
    """Refuses magnitudes that a configuration does not mention, and modules that lack theirs."""
    components = {name: _component(name, names) for name in groups}
    of_peft = {components[name] for name, parts in groups.items() if Role.MAGNITUDE in parts}
    for name, parts in groups.items():
        found = settings.get(components[name])
        is_wanted = components[name] in of_peft if found is None else found.use_dora
        if is_wanted != (Role.MAGNITUDE in parts) and Role.DORA not in parts:
            has = "lacks a DoRA magnitude" if is_wanted else "has a DoRA magnitude"
            other = "other modules have one" if found is None else f"use_dora is {found.use_dora}"
            raise AdapterRefused(
                RefusalCode.DORA_TENSORS, f"{name} {has}, and {other}.", fix="Save it again."
            )


def _component(name: str, names: PipelineNames) -> str:
    named = names.find(name)
    assert named is not None
    return named.component


def _deltas(
    name: str,
    named: Named,
    parts: Mapping[Role, Tensor],
    names: PipelineNames,
    settings: LoraSettings | None,
) -> Iterator[tuple[str, ModuleDelta]]:
    """Yield (path, delta) for each module that the file's matrix stands for."""
    lengths = magnitude(name, parts)
    factors = read_factors(name, {r: part for r, part in parts.items() if r not in _BESIDE})
    weights = [names.targets[named.component][path].weight for path in named.paths]
    num_rows = sum(len(weight) for weight in weights)
    if factors is not None and factors.num_rows != num_rows:
        raise wrong_shape(
            f"{name} is for a layer with {factors.num_rows} outputs, and this model's has "
            f"{num_rows}"
        )
    scale = 1.0
    if factors is not None and Role.DIFF not in parts:
        scale = _scale(name, named, parts.get(Role.ALPHA), factors.rank, settings)
        factors = factors.scaled(scale)
    bias = _bias(name, parts, scale, num_rows)
    if lengths is not None:
        _check_lengths(name, factors, lengths, bias, num_rows)
    if named.swaps_halves:
        factors = None if factors is None else factors.swapped()
        lengths, bias = (_swapped(rows) for rows in (lengths, bias))
    start = 0
    for path, weight in zip(named.paths, weights, strict=True):
        rows = slice(start, start + len(weight))
        delta: ModuleDelta = _nothing(weight)
        if factors is not None:
            delta = factors.part(name, weight, start)
        if lengths is not None and isinstance(delta, LowRank):
            dora = dora_rows(name, weight, delta.a, delta.b, lengths[rows])
            delta = replace(delta, dora=dora)
        yield path, delta if bias is None else replace(delta, bias=bias[rows].contiguous())
        start = rows.stop


def _nothing(weight: Tensor) -> LowRank:
    return LowRank(torch.zeros(0, *weight.shape[1:]), torch.zeros(len(weight), 0))


def _swapped(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else torch.cat(rows.chunk(2)[::-1])


def _bias(name: str, parts: Mapping[Role, Tensor], scale: float, num_rows: int) -> Tensor | None:
    """Return the change of the bias; PEFT scales that of lora_B as the matrices."""
    scales = ((Role.BIAS, scale), (Role.DIFF_BIAS, 1.0))
    biases = [parts[role].flatten() * factor for role, factor in scales if role in parts]
    for bias in biases:
        if len(bias) != num_rows:
            raise wrong_shape(f"{name} has a bias of {len(bias)} for {num_rows} outputs")
    return sum(biases[1:], start=biases[0]) if biases else None


def _check_lengths(
    name: str,
    factors: Pair | KroneckerFactors | None,
    lengths: Tensor,
    bias: Tensor | None,
    num_rows: int,
) -> None:
    if len(lengths) != num_rows:
        raise wrong_shape(f"{name} has {len(lengths)} DoRA magnitudes for {num_rows} outputs")
    if not isinstance(factors, Pair) or bias is not None:
        what = "a bias" if bias is not None else "the whole factors of a LoKr"
        raise AdapterRefused(
            RefusalCode.DORA_TENSORS,
            f"{name} has a DoRA magnitude beside {what}, which PEFT and diffusers do not compute.",
            fix="Train it without DoRA.",
        )


def _is_same(one: ModuleDelta, other: ModuleDelta) -> bool:
    """Whether two names of one module bring the same change: some files have both."""
    if any(delta.dora is not None or delta.bias is not None for delta in (one, other)):
        return False
    return torch.allclose(one.delta(), other.delta(), rtol=1e-4, atol=1e-7)


def _scale(
    name: str, named: Named, alpha: Tensor | None, rank: int | None, settings: LoraSettings | None
) -> float:
    if alpha is None:
        return 1.0 if settings is None else settings.scale(named.paths[0], rank)
    if rank is None:
        return 1.0
    if alpha.numel() != 1:
        raise wrong_shape(f"{name}.alpha has the shape {list(alpha.shape)}")
    value = float(alpha)
    if settings is not None and settings.alpha(named.paths[0]) != value:
        raise AdapterRefused(
            ImageRefusal.CONFLICTING_ALPHA,
            f"{name} has the alpha {value:g}, and the configuration says "
            f"{settings.alpha(named.paths[0]):g}.",
            fix="Save the adapter with one of them.",
        )
    return value / rank


def _check_effect(
    adapter: ImageAdapter, groups: _Groups, settings: Mapping[str, LoraSettings]
) -> None:
    deltas = [delta for modules in adapter.components.values() for delta in modules.values()]
    if any(map(_has_effect, deltas)):
        return
    alphas = [float(parts[Role.ALPHA]) for parts in groups.values() if Role.ALPHA in parts]
    is_alpha = 0 in alphas or any(found.lora_alpha == 0 for found in settings.values())
    raise AdapterRefused(
        RefusalCode.NO_EFFECT,
        f"{'Its alpha is 0' if is_alpha else 'All its matrices are zero'}, so that it would change "
        "nothing.",
        fix="Save it with the alpha that it was trained with."
        if is_alpha
        else "Save the adapter after training.",
    )


def _has_effect(delta: ModuleDelta) -> bool:
    if delta.bias is not None and bool(delta.bias.any()):
        return True
    if isinstance(delta, Kronecker):
        return bool(delta.left.any()) and bool(delta.right.any())
    if delta.dora is not None and float(delta.dora[0].abs().max()) > _ROUNDING:
        return True
    return bool(delta.a.any()) and bool(delta.b.any())


def _report(
    content: FileContent, adapter: ImageAdapter, styles: Counter[str], groups: _Groups
) -> AdapterReport:
    deltas = [delta for modules in adapter.components.values() for delta in modules.values()]
    kinds = {"LoHa": {*LOHA}, "LoKr": LOKR, "LoCon (Tucker)": {Role.MID}}
    found = [
        kind
        for kind, roles in kinds.items()
        if any(roles & parts.keys() for parts in groups.values())
    ]
    convolutions = any(isinstance(delta, LowRank) and delta.a.dim() == 4 for delta in deltas)
    if adapter.is_dora:
        found.append("DoRA")
    plain = "LoRA with convolutions" if convolutions else "LoRA"
    method = " and ".join(found) or plain
    if any(delta.bias is not None for delta in deltas):
        method += " with biases"
    ranks = Counter(delta.rank for delta in deltas)
    return AdapterReport(
        path=content.path,
        cid=content.cid,
        formats=tuple(style for style, _ in styles.most_common()),
        method=method,
        num_modules={name: len(modules) for name, modules in adapter.components.items()},
        ranks=dict(sorted(ranks.items())),
        num_bytes=content.num_bytes,
        trigger_words=trigger_words(content.metadata),
    )
