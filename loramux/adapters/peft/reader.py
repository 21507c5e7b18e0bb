"""Reads a PEFT LoRA folder, checks it against the base, and hashes the bytes it read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from loramux.adapters.identity import FileDigest, Manifest, compute_cid, make_manifest
from loramux.adapters.peft.config import PeftLoraConfig, read_config
from loramux.adapters.peft.folder import open_folder, refusing_os_errors, short_base_name
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    WEIGHTS_NAME,
    TensorEntry,
    broken,
    find_weights,
    parse_header,
    read_head,
)
from loramux.adapters.peft.targets import plan_modules
from loramux.adapters.peft.tensors import MatchedTensors, match_tensors
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    tensors: dict[str, torch.Tensor]
    digest: FileDigest


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """An open weights file with a checked header."""

    path: Path
    file: BinaryIO
    size: int
    head: bytes
    entries: tuple[TensorEntry, ...]

    def load(self) -> LoadedWeights:
        """Reads the file once, so that the hashed bytes are the served bytes."""
        with refusing_os_errors(self.path):
            self.file.seek(0)
            content = self.file.read(self.size + 1)
        if len(content) != self.size or not content.startswith(self.head):
            raise _changed_while_read()
        digest = FileDigest(hashlib.sha256(content).hexdigest(), self.size)
        try:
            tensors = safetensors.torch.load(content)
        except SafetensorError as error:
            raise broken(str(error)) from error
        return LoadedWeights(tensors, digest)


def _changed_while_read() -> AdapterRefused:
    return AdapterRefused(
        RefusalCode.UNREADABLE,
        f"{WEIGHTS_NAME} changed while it was read.",
        fix="Write adapters to a new folder and rename it into place.",
    )


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsFile]:
    """Opens the weights of an adapter folder and checks their header."""
    path = find_weights(folder)
    with refusing_os_errors(path):
        file = path.open("rb")
    with file:
        with refusing_os_errors(path):
            size = os.fstat(file.fileno()).st_size
            head = read_head(file, size)
        entries = parse_header(head[LENGTH_BYTES:], size - len(head))
        yield WeightsFile(path, file, size, head, entries)


@dataclass(frozen=True, slots=True, eq=False)
class LoraModule:
    """The LoRA of one linear layer: it adds scale * (b @ a) to the weight."""

    target: TargetModule
    rank: int
    alpha: float
    scale: float
    a: torch.Tensor
    """[rank, in], in the dtype of the file."""
    b: torch.Tensor
    """[out, rank], in the dtype of the file; the scale is not applied."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedAdapter:
    """An adapter that passed every check, with its tensors in memory."""

    cid: str
    manifest: Manifest
    path: Path
    config: PeftLoraConfig
    size_bytes: int
    """The size of the tensors of `modules` in the file."""
    modules: tuple[LoraModule, ...]
    """One entry for each adapted linear layer, in the order of the base."""
    warnings: tuple[str, ...]
    tensors_used: tuple[str, ...]
    tensors_unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class InspectedAdapter:
    """What the config and the header of the weights say of an adapter that this base can serve."""

    path: Path
    config: PeftLoraConfig
    matched: MatchedTensors
    warnings: tuple[str, ...]

    @property
    def ranks(self) -> dict[tuple[int, str], int]:
        """The rank at each (layer, projection) that the adapter changes."""
        return {(p.target.layer, p.target.projection): p.rank for p in self.matched.plans}

    @property
    def size_bytes(self) -> int:
        """The size of the LoRA tensors in the file."""
        return sum(pair.a.num_bytes + pair.b.num_bytes for pair in self.matched.pairs)


def read_adapter(
    folder: Path, base: BaseModelInfo, *, max_rank: int | None = None, strict_base: bool = False
) -> CheckedAdapter:
    """Reads, checks and hashes an adapter folder.

    Raises AdapterNotFound, or AdapterRefused with the reason. It may run in any thread.
    """
    with _inspecting(folder, base, max_rank=max_rank, strict_base=strict_base) as (found, weights):
        loaded = weights.load()
    modules = make_modules(found.matched, loaded.tensors)
    manifest = make_manifest(found.config.canonical(), {WEIGHTS_NAME: loaded.digest})
    used = [entry for pair in found.matched.pairs for entry in (pair.a, pair.b)]
    return CheckedAdapter(
        cid=compute_cid(manifest),
        manifest=manifest,
        path=found.path,
        config=found.config,
        size_bytes=found.size_bytes,
        modules=modules,
        warnings=(*found.warnings, *check_effect(modules)),
        tensors_used=tuple(entry.name for entry in used),
        tensors_unused=found.matched.unused,
    )


def inspect_adapter(
    folder: Path, base: BaseModelInfo, *, max_rank: int | None = None, strict_base: bool = False
) -> InspectedAdapter:
    """Checks the config and the header of the weights, and reads no tensor.

    Raises as read_adapter does, except for faults of the values: NaN, or weights without effect.
    """
    with _inspecting(folder, base, max_rank=max_rank, strict_base=strict_base) as (found, _):
        return found


@contextmanager
def _inspecting(
    folder: Path, base: BaseModelInfo, *, max_rank: int | None, strict_base: bool
) -> Iterator[tuple[InspectedAdapter, WeightsFile]]:
    path = open_folder(Path(folder))
    config = read_config(path)
    warnings = check_base_name(config, base, strict=strict_base) + check_task(config)
    plans = plan_modules(config, base.targets)
    with open_weights(path) as weights:
        matched = match_tensors(weights.entries, plans, base, max_rank=max_rank)
        yield InspectedAdapter(path, config, matched, tuple(warnings)), weights


def check_base_name(config: PeftLoraConfig, base: BaseModelInfo, *, strict: bool) -> list[str]:
    recorded = config.base_model_name
    if recorded is None:
        return ["The config does not record the base that the adapter was trained on."]
    if short_base_name(recorded) == short_base_name(base.name):
        return []
    message = f"The adapter was trained on {recorded[:200]!r}; this base is {base.name!r}."
    if strict:
        raise AdapterRefused(
            RefusalCode.OTHER_BASE,
            message,
            fix="Serve it on its own base, or allow other base names.",
        )
    return [message]


def check_task(config: PeftLoraConfig) -> list[str]:
    if config.task_type in (None, "CAUSAL_LM"):
        return []
    return [f"The adapter was trained for {config.task_type}, not for text generation."]


def make_modules(
    matched: MatchedTensors, tensors: dict[str, torch.Tensor]
) -> tuple[LoraModule, ...]:
    return tuple(
        LoraModule(
            target=plan.target,
            rank=plan.rank,
            alpha=plan.alpha,
            scale=plan.scale,
            a=tensors[pair.a.name],
            b=tensors[pair.b.name],
        )
        for plan, pair in zip(matched.plans, matched.pairs, strict=True)
    )


def check_effect(modules: tuple[LoraModule, ...]) -> list[str]:
    idle = [module.target.path for module in modules if not has_effect(module)]
    if len(idle) == len(modules):
        raise AdapterRefused(
            RefusalCode.NO_EFFECT,
            "The adapter changes nothing: scale * B @ A is zero in every module.",
            fix="It seems untrained, or lora_alpha is 0; give the trained one.",
        )
    return [f"{len(idle)} modules have no effect: {name_some(idle)}."] if idle else []


def has_effect(module: LoraModule) -> bool:
    """Returns whether scale * B @ A can be other than zero; refuses values that are not finite."""
    nonzero = [has_nonzero(module, half) for half in ("a", "b")]
    return module.scale != 0 and all(nonzero) and ranks_meet(module.a, module.b)


def has_nonzero(module: LoraModule, half: str) -> bool:
    # One reduction finds both: NaN and infinity propagate to the minimum or maximum.
    low, high = torch.aminmax(module.a if half == "a" else module.b)
    if not math.isfinite(low.item()) or not math.isfinite(high.item()):
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"{module.target.path} has NaN or infinite values in lora_{half.upper()}.",
            fix="The training diverged; give an earlier checkpoint.",
        )
    return low.item() != 0 or high.item() != 0


def ranks_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether some rank is nonzero in both A and B.

    The first feature of each nearly always decides this, so it is tested first.
    """
    if bool(((a[:, 0] != 0) & (b[0] != 0)).any()):
        return True
    return bool((a.any(dim=1) & b.any(dim=0)).any())
