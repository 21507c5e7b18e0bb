"""A PEFT LoRA folder -> weights that are safe and right to serve, or why they are refused."""

from __future__ import annotations

import hashlib
import math
import os
import re
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
from loramux.adapters.peft.folder import open_folder, refusing_os_errors
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
    """An open file whose header has been checked."""

    path: Path
    file: BinaryIO
    size: int
    head: bytes
    entries: tuple[TensorEntry, ...]

    def load(self) -> LoadedWeights:
        """Reads the file once: what is hashed is what is served."""
        with refusing_os_errors(self.path):
            self.file.seek(0)
            content = self.file.read(self.size + 1)
        if len(content) != self.size or not content.startswith(self.head):
            raise AdapterRefused(
                RefusalCode.UNREADABLE,
                f"{WEIGHTS_NAME} changed while it was read.",
                fix="Write adapters to a new folder and rename it into place.",
            )
        digest = FileDigest(hashlib.sha256(content).hexdigest(), self.size)
        try:
            tensors = safetensors.torch.load(content)
        except SafetensorError as error:
            raise broken(str(error)) from error
        return LoadedWeights(tensors, digest)


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsFile]:
    path = find_weights(folder)
    with refusing_os_errors(path):
        file = path.open("rb")
    with file:
        with refusing_os_errors(path):
            size = os.fstat(file.fileno()).st_size
            head = read_head(file, size)
        entries = parse_header(head[LENGTH_BYTES:], size - len(head))
        yield WeightsFile(path, file, size, head, entries)


HUB_CACHE = re.compile(r"models--(?:.+--)?(?P<name>[^/]+)/snapshots/[^/]+$")


@dataclass(frozen=True, slots=True, eq=False)
class LoraModule:
    """The change to one layer: scale * (b @ a)."""

    target: TargetModule
    rank: int
    alpha: float
    scale: float
    a: torch.Tensor
    """[rank, in], as saved"""
    b: torch.Tensor
    """[out, rank], as saved, without the scale"""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedAdapter:
    cid: str
    manifest: Manifest
    path: Path
    config: PeftLoraConfig
    size_bytes: int
    """Of the tensors in `modules`."""
    modules: tuple[LoraModule, ...]
    """In the base's order."""
    warnings: tuple[str, ...]
    tensors_used: tuple[str, ...]
    tensors_unused: tuple[str, ...]


def read_adapter(
    folder: Path, base: BaseModelInfo, *, max_rank: int | None = None, strict_base: bool = False
) -> CheckedAdapter:
    """Raises AdapterNotFound or AdapterRefused. May run in any thread."""
    path = open_folder(Path(folder))
    config = read_config(path)
    warnings = check_base_name(config, base, strict=strict_base) + check_task(config)
    plans = plan_modules(config, base.targets)
    with open_weights(path) as weights:
        matched = match_tensors(weights.entries, plans, base, max_rank=max_rank)
        loaded = weights.load()
    modules = make_modules(matched, loaded.tensors)
    warnings += check_effect(modules)
    manifest = make_manifest(config.canonical(), {WEIGHTS_NAME: loaded.digest})
    used = [entry for pair in matched.pairs for entry in (pair.a, pair.b)]
    return CheckedAdapter(
        cid=compute_cid(manifest),
        manifest=manifest,
        path=path,
        config=config,
        size_bytes=sum(entry.num_bytes for entry in used),
        modules=modules,
        warnings=tuple(warnings),
        tensors_used=tuple(entry.name for entry in used),
        tensors_unused=matched.unused,
    )


def check_base_name(config: PeftLoraConfig, base: BaseModelInfo, *, strict: bool) -> list[str]:
    recorded = config.base_model_name
    if recorded is None:
        return ["The config does not record the base that the adapter was trained on."]
    if short_name(recorded) == short_name(base.name):
        return []
    message = f"The adapter was trained on {recorded[:200]!r}; this base is {base.name!r}."
    if strict:
        raise AdapterRefused(
            RefusalCode.OTHER_BASE,
            message,
            fix="Serve it on its own base, or allow other base names.",
        )
    return [message]


def short_name(name: str) -> str:
    """The model's own name: without owner, folders or the hub cache's layout."""
    path = name.replace("\\", "/").rstrip("/")
    cached = HUB_CACHE.search(path)
    return (cached["name"] if cached else path.rsplit("/", 1)[-1]).lower()


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
    """Refuses values that are not finite."""
    nonzero = [has_nonzero(module, half) for half in ("a", "b")]
    return module.scale != 0 and all(nonzero) and ranks_meet(module.a, module.b)


def has_nonzero(module: LoraModule, half: str) -> bool:
    # One reduction answers both questions: NaN and infinity come through as an extreme.
    low, high = torch.aminmax(module.a if half == "a" else module.b)
    if not math.isfinite(low.item()) or not math.isfinite(high.item()):
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"{module.target.path} has NaN or infinite values in lora_{half.upper()}.",
            fix="The training diverged; give an earlier checkpoint.",
        )
    return low.item() != 0 or high.item() != 0


def ranks_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Some rank is not zero in A nor in B; the first feature of each tells it nearly always."""
    if bool(((a[:, 0] != 0) & (b[0] != 0)).any()):
        return True
    return bool((a.any(dim=1) & b.any(dim=0)).any())
