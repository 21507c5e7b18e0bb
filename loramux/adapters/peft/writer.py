"""Writes adapter folders that PEFT loads: deterministic bytes, all files or none."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.adapters.peft.config import CONFIG_NAME, PeftLoraConfig
from loramux.adapters.peft.safetensors import LENGTH_BYTES, WEIGHTS_NAME
from loramux.adapters.peft.targets import matching_paths, targeted_paths
from loramux.adapters.peft.tensors import LAYER_NUMBER
from loramux.errors import InvalidRequest

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
ALIGNMENT = 8
STAGING_MARK = ".loramux-"


@dataclass(frozen=True, slots=True, eq=False)
class WrittenModule:
    """The LoRA of one module: it adds scale * (b @ a) to the weight."""

    path: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def lora_fields(
    modules: Sequence[WrittenModule],
    configs: Sequence[PeftLoraConfig],
    *,
    known_paths: Collection[str],
) -> dict[str, object]:
    """Return the fields of an adapter_config.json for modules that come from these adapters.

    `known_paths`: all modules of the adapters; those without a written module are not targeted.
    """
    ranks = {module.path: module.rank for module in modules}
    # PEFT divides alpha by the rank, so that this gives the scale back.
    alphas = {module.path: _plain_number(module.scale * module.rank) for module in modules}
    rank, rank_pattern = _default_and_pattern(ranks)
    alpha, alpha_pattern = _default_and_pattern(alphas)
    return {
        "peft_type": "LORA",
        "task_type": _common([config.task_type for config in configs]),
        "base_model_name_or_path": next(
            (config.base_model_name for config in configs if config.base_model_name), None
        ),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        **target_fields(configs, {module.path for module in modules}, known_paths),
    }


def target_fields(
    configs: Sequence[PeftLoraConfig], paths: set[str], known_paths: Collection[str]
) -> dict[str, object]:
    """Return target fields that select exactly the modules `paths`.

    Equal fields of all adapters are kept and plain lists of names are joined, if they select these
    modules and no others in the known layers; else every module is named by its path.
    """
    one = configs[0]
    grid = sorted(_in_every_layer(known_paths))
    if len({_selection(config) for config in configs}) == 1 and targeted_paths(one, grid) == paths:
        return {
            "target_modules": _listed(one.target_modules),
            "exclude_modules": _listed(one.exclude_modules) or None,
            "layers_to_transform": list(one.layers_to_transform) or None,
            "layers_pattern": list(one.layers_pattern) or None,
        }
    names: set[str] = set()
    for config in configs:
        if (
            isinstance(config.target_modules, str)
            or config.exclude_modules
            or config.layers_to_transform
        ):
            return {"target_modules": sorted(paths)}
        names.update(config.target_modules)
    chosen = tuple(sorted(names))
    if matching_paths("target_modules", chosen, grid) != paths:
        return {"target_modules": sorted(paths)}
    return {"target_modules": list(chosen)}


def _selection(config: PeftLoraConfig) -> tuple[object, ...]:
    return (
        config.target_modules,
        config.exclude_modules,
        config.layers_to_transform,
        config.layers_pattern,
    )


def _in_every_layer(paths: Collection[str]) -> set[str]:
    """Return the paths, and each of them with the number of every layer that occurs in one."""
    numbers = {match[1] for path in paths if (match := LAYER_NUMBER.match(path))}
    grid = set(paths)
    for path in paths:
        if match := LAYER_NUMBER.match(path):
            start, end = match.span(1)
            grid.update(path[:start] + number + path[end:] for number in numbers)
    return grid


def _default_and_pattern(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the most frequent value, and a pattern for each module that has another one.

    A projection with one value in all layers is named by its last name part.
    """
    default = min(Counter(values.values()).items(), key=lambda item: (-item[1], item[0]))[0]
    by_name: dict[str, set[float]] = defaultdict(set)
    for path, value in values.items():
        by_name[path.rpartition(".")[2]].add(value)
    pattern = {}
    for path, value in sorted(values.items()):
        name = path.rpartition(".")[2]
        if by_name[name] != {default}:
            pattern[name if len(by_name[name]) == 1 else path] = value
    return default, pattern


def _plain_number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _common(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def _listed(names: tuple[str, ...] | str) -> object:
    return names if isinstance(names, str) else list(names)


def lora_tensors(modules: Sequence[WrittenModule]) -> dict[str, torch.Tensor]:
    """Return the tensors under PEFT's names."""
    return {
        f"base_model.model.{module.path}.lora_{half}.weight": tensor
        for module in modules
        for half, tensor in (("A", module.a), ("B", module.b))
    }


def write_files(
    folder: Path,
    fields: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing folder."""
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    _write_synced(folder / CONFIG_NAME, [text.encode("utf-8")])
    _write_synced(folder / WEIGHTS_NAME, safetensors_chunks(tensors, metadata or {}))


def safetensors_chunks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes]:
    """Yield the file in parts; equal tensors and metadata give equal bytes.

    The library of safetensors writes the metadata in an order that varies from run to run.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    # Larger types first, so that all data is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for name in names:
        yield tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _write_synced(path: Path, chunks: Iterator[bytes] | Sequence[bytes]) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a staging folder that becomes `folder` after the block, or vanishes if it raises.

    Refuses a folder that exists and is not empty, before the block and after it. Staging folders
    of processes that died are removed.
    """
    folder = folder.expanduser().absolute()
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}{STAGING_MARK}"
    for left in folder.parent.glob(f"{prefix}*"):
        _remove_if_abandoned(left)
    staging = folder.parent / f"{prefix}{secrets.token_hex(8)}"
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield staging
        os.fsync(descriptor)
        refuse_existing(folder)
        staging.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def refuse_existing(folder: Path) -> None:
    """Refuses to write over anything but an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InvalidRequest(
            f"{folder} exists and is not an empty folder. Name a new one.", param="out"
        )


def _remove_if_abandoned(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
