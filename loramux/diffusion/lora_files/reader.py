"""Reads an adapter of an image model strictly: every tensor is used, or the file is refused.

The pipeline is only looked at: names and shapes come from its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.images.keys import LOHA, Role, split_key
from loramux.adapters.images.origin import trigger_words
from loramux.adapters.images.refusals import ImageRefusal, refuse_unserved
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.diffusion.adapter import ImageAdapter, LowRank
from loramux.diffusion.dora import dora_rows
from loramux.diffusion.lora_files.content import FileContent, read_file
from loramux.diffusion.lora_files.methods import low_rank, magnitude, wrong_shape
from loramux.diffusion.lora_files.names import Named, PipelineNames
from loramux.diffusion.lora_files.scales import LoraSettings, parse_settings, settings_in_header
from loramux.diffusion.lora_files.unknown import refuse_unknown
from loramux.errors import AdapterRefused

_BESIDE = (Role.ALPHA, Role.DORA, Role.MAGNITUDE)
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
    """Reads a file or a folder; raises AdapterRefused with the reason and the fix."""
    content = read_file(place)
    groups = _group(content, names)
    settings = _settings(content, names)
    _check_dora(groups, names, settings)
    made: dict[str, dict[str, LowRank]] = {}
    styles: Counter[str] = Counter()
    for name, parts in groups.items():
        named = names.find(name)
        assert named is not None
        styles[named.style] += 1
        for path, pair in _pairs(name, named, parts, names, settings.get(named.component)):
            modules = made.setdefault(named.component, {})
            if path in modules:
                raise AdapterRefused(
                    RefusalCode.DUPLICATE_TENSORS,
                    f"The file changes {named.component}.{path} twice, the second time as {name}.",
                    fix="Save the adapter again.",
                )
            modules[path] = pair
    adapter = ImageAdapter(cid=content.cid, components=made)
    _check_effect(adapter)
    return adapter, _report(content, adapter, styles, groups)


def _group(content: FileContent, names: PipelineNames) -> _Groups:
    """Groups the tensors by module; refuses what has no place in the pipeline."""
    groups: _Groups = {}
    unknown: list[str] = []
    for key, tensor in content.tensors.items():
        found = split_key(key)
        if found is None:
            unknown.append(key)
            continue
        name, role = found
        refuse_unserved(key, role)
        if names.is_ambiguous(name):
            raise AdapterRefused(
                ImageRefusal.AMBIGUOUS_NAME,
                f"{key} could be several modules of this model.",
                fix="Save the adapter with the names of diffusers.",
            )
        if names.find(name) is None:
            unknown.append(key)
            continue
        parts = groups.setdefault(name, {})
        if role in parts:
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{name} has two tensors for {role}.",
                fix="Save the adapter again.",
            )
        parts[role] = tensor.float()
    if unknown:
        refuse_unknown(unknown, len(content.tensors), names)
    if not groups:
        raise AdapterRefused(
            RefusalCode.NO_TENSORS, f"{content.path.name} has no tensors.", fix="Save it again."
        )
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


def _pairs(
    name: str,
    named: Named,
    parts: Mapping[Role, Tensor],
    names: PipelineNames,
    settings: LoraSettings | None,
) -> Iterator[tuple[str, LowRank]]:
    """Yields (path, pair) for each module that the file's matrix stands for."""
    factors: dict[Role, Tensor] = {
        role: tensor for role, tensor in parts.items() if role not in _BESIDE
    }
    lengths = magnitude(name, parts)
    a, b, rank = low_rank(name, factors)
    b = b * _scale(name, named, parts.get(Role.ALPHA), rank, settings)
    if named.swaps_halves:
        b = torch.cat(b.chunk(2)[::-1])
        lengths = None if lengths is None else torch.cat(lengths.chunk(2)[::-1])
    weights = [names.targets[named.component][path].weight for path in named.paths]
    num_rows = sum(len(weight) for weight in weights)
    if len(b) != num_rows:
        raise wrong_shape(
            f"{name} is for a layer with {len(b)} outputs, and this model's has {num_rows}"
        )
    if lengths is not None and len(lengths) != num_rows:
        raise wrong_shape(f"{name} has {len(lengths)} DoRA magnitudes for {num_rows} outputs")
    start = 0
    for path, weight in zip(named.paths, weights, strict=True):
        rows = slice(start, start + len(weight))
        fitted, part, dora = _fitted(name, a, weight), b[rows].contiguous(), None
        if lengths is not None:
            dora = dora_rows(name, weight, fitted, part, lengths[rows])
        yield path, LowRank(fitted, part, dora)
        start = rows.stop


def _scale(
    name: str, named: Named, alpha: Tensor | None, rank: int, settings: LoraSettings | None
) -> float:
    if alpha is None:
        return 1.0 if settings is None else settings.scale(named.paths[0], rank)
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


def _fitted(name: str, a: Tensor, weight: Tensor) -> Tensor:
    """Returns A in the shape of the layer; 1 x 1 convolutions and linear layers are the same."""
    wanted = weight.shape[1:]
    is_same_size = a[0].numel() == wanted.numel() and (
        a.dim() == 2 or a.shape[1:] == wanted or a.shape[1] == wanted.numel()
    )
    if not is_same_size:
        raise wrong_shape(
            f"{name} is for a layer with inputs {list(a.shape[1:])}, and this model's has "
            f"{list(wanted)}"
        )
    return a.reshape(len(a), *wanted).contiguous()


def _check_effect(adapter: ImageAdapter) -> None:
    pairs = [pair for modules in adapter.components.values() for pair in modules.values()]
    if not any(_has_effect(pair) for pair in pairs):
        raise AdapterRefused(
            RefusalCode.NO_EFFECT,
            "All its matrices are zero, so that it would change nothing.",
            fix="Save the adapter after training.",
        )


def _has_effect(pair: LowRank) -> bool:
    if pair.dora is not None and float(pair.dora[0].abs().max()) > _ROUNDING:
        return True
    return bool(pair.a.any()) and bool(pair.b.any())


def _report(
    content: FileContent, adapter: ImageAdapter, styles: Counter[str], groups: _Groups
) -> AdapterReport:
    kinds = {LOHA[0]: "LoHa", Role.MID: "LoCon (Tucker)"}
    found = [
        kind for role, kind in kinds.items() if any(role in parts for parts in groups.values())
    ]
    convolutions = any(
        pair.a.dim() == 4 for modules in adapter.components.values() for pair in modules.values()
    )
    if adapter.is_dora:
        found.append("DoRA")
    plain = "LoRA with convolutions" if convolutions else "LoRA"
    ranks = Counter(
        pair.rank for modules in adapter.components.values() for pair in modules.values()
    )
    return AdapterReport(
        path=content.path,
        cid=content.cid,
        formats=tuple(style for style, _ in styles.most_common()),
        method=" and ".join(found) or plain,
        num_modules={name: len(modules) for name, modules in adapter.components.items()},
        ranks=dict(sorted(ranks.items())),
        num_bytes=content.num_bytes,
        trigger_words=trigger_words(content.metadata),
    )
