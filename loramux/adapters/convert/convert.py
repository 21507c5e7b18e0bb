"""Rewrites an adapter that is refused for its form into one that can be served."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.adapters.convert.load import cast_tensors, load_tensors
from loramux.adapters.convert.names import translate_names
from loramux.adapters.peft.config import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    decode_json,
    parse_config,
)
from loramux.adapters.peft.fields import BASE_CHANGING_INITIALIZATIONS
from loramux.adapters.peft.folder import find_file, open_folder, refusing_os_errors
from loramux.adapters.peft.names import LORA_NAME
from loramux.adapters.peft.parts import LoraModule
from loramux.adapters.peft.reader import CheckedAdapter
from loramux.adapters.peft.refusals import RefusalCode, name_some
from loramux.adapters.peft.targets import targeted_paths
from loramux.adapters.peft.types.configs import lora_config
from loramux.adapters.peft.unbound import read_without_base
from loramux.adapters.peft.writer import WrittenModule, lora_fields, lora_tensors, write_files
from loramux.errors import AdapterRefused, InvalidRequest

# The base was quantised after the subtraction, so that the difference is not exact.
INEXACT_INITIALIZATIONS = ("loftq",)
RANK_FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
TARGET_FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
HOW_TO_SAVE_INITIAL = (
    "Give the adapter that PEFT saved before the first training step with --initial DIR; its "
    "initial values cannot be found out from the trained adapter."
)


@dataclass(frozen=True, slots=True)
class Conversion:
    adapter: CheckedAdapter
    """The written adapter, read again without its base."""
    changes: tuple[str, ...]
    """A sentence for each change; none if the adapter was as it should be."""


@dataclass(frozen=True, slots=True, eq=False)
class RewrittenFiles:
    fields: dict[str, object]
    tensors: dict[str, torch.Tensor]


def convert_adapter(
    source: Path, folder: Path, *, initial: Path | None = None, dtype: str | None = None
) -> Conversion:
    """Write the converted adapter into the existing folder `folder`, and read it again.

    `initial`: the adapter before training, for an initialization that changes the base's weights.
    Raises AdapterRefused for what no conversion can repair.
    """
    changes: list[str] = []
    wanted = None if dtype is None else getattr(torch, dtype)
    files = _rewrite(source, wanted, changes)
    start = files.fields.get("init_lora_weights", True)
    if changes_base(start):
        files = _subtract_initial(files, str(start), source, initial, changes)
    elif initial is not None:
        raise InvalidRequest(
            f"init_lora_weights is {start!r}, so the base was not changed and there is nothing to "
            "subtract. Leave --initial out.",
            param="initial",
        )
    write_files(folder, files.fields, files.tensors)
    return Conversion(read_without_base(folder), tuple(changes))


def changes_base(initialization: object) -> bool:
    return isinstance(initialization, str) and initialization.lower().startswith(
        BASE_CHANGING_INITIALIZATIONS
    )


def _rewrite(source: Path, dtype: torch.dtype | None, changes: list[str]) -> RewrittenFiles:
    """Return config and tensors with PEFT's names, as safetensors can hold them."""
    folder = open_folder(source)
    fields = _read_fields(folder)
    tensors = load_tensors(folder, changes)
    renaming = translate_names(tensors)
    changes += renaming.changes
    tensors = {renaming.names[name]: tensor for name, tensor in tensors.items()}
    tensors = cast_tensors(tensors, dtype, changes)
    paths = sorted({match["path"] for name in tensors if (match := LORA_NAME.fullmatch(name))})
    _set_targets(fields, paths, moved=renaming.moves_modules, changes=changes)
    return RewrittenFiles(fields, tensors)


def _read_fields(folder: Path) -> dict[str, object]:
    path = find_file(folder, CONFIG_NAME)
    if path is None:
        raise AdapterRefused(
            RefusalCode.CONFIG_MISSING,
            f"The folder has no {CONFIG_NAME}.",
            fix="Give the folder that PEFT's save_pretrained wrote.",
        )
    with refusing_os_errors(path), path.open("rb") as file:
        return decode_json(file.read(MAX_CONFIG_BYTES + 1))


def _set_targets(
    fields: dict[str, object], paths: list[str], *, moved: bool, changes: list[str]
) -> None:
    """Make target_modules name the modules of the file if it is unset, or if they were renamed."""
    is_unset = fields.get("target_modules") in (None, [], "")
    if not paths or not (is_unset or moved):
        return
    if not is_unset:
        plain = {**fields, "init_lora_weights": True}
        if targeted_paths(parse_config(plain), paths) == set(paths):
            return
    for name in TARGET_FIELDS:
        fields.pop(name, None)
    fields["target_modules"] = paths
    changes.append(f"Set target_modules to the {len(paths)} modules of the weights file.")


def _subtract_initial(
    files: RewrittenFiles, start: str, source: Path, initial: Path | None, changes: list[str]
) -> RewrittenFiles:
    """Return the plain LoRA of rank 2r that adds s * (B A - B0 A0) to the original base."""
    if start.lower().startswith(INEXACT_INITIALIZATIONS):
        raise AdapterRefused(
            RefusalCode.CHANGES_BASE,
            f"init_lora_weights is {start!r}: the base was quantised with the adapter, so no LoRA "
            "has the same effect on the original base.",
            fix="Serve it on the quantised base that it was trained on, or train it again.",
        )
    if initial is None:
        raise AdapterRefused(
            RefusalCode.CHANGES_BASE,
            f"init_lora_weights is {start!r}: the adapter was trained on a changed copy of the "
            "base.",
            fix=HOW_TO_SAVE_INITIAL,
        )
    trained = _read_rewritten(files)
    first = _read_rewritten(_rewrite(initial, None, []))
    check_same_shape(trained, first, str(initial))
    before = {module.target.path: module for module in first.modules}
    modules = [subtract(module, before[module.target.path]) for module in trained.modules]
    paths = {module.path for module in modules}
    config = lora_config(trained.config, "The adapter")
    made = lora_fields(modules, [config], known_paths=paths)
    fields = {**files.fields, "init_lora_weights": True, **{n: made[n] for n in RANK_FIELDS}}
    changes.append(
        f"Subtracted the initial adapter of {start}, which doubles the rank: the result is a plain "
        "LoRA of the original base."
    )
    return RewrittenFiles(fields, lora_tensors(modules))


def subtract(trained: LoraModule, first: LoraModule) -> WrittenModule:
    """Return [B, -B0] and [A; A0], whose GEMM is B A - B0 A0 exactly."""
    dtype = torch.promote_types(trained.a.dtype, first.a.dtype)
    return WrittenModule(
        path=trained.target.path,
        a=torch.cat([trained.a.to(dtype), first.a.to(dtype)], dim=0),
        b=torch.cat([trained.b.to(dtype), -first.b.to(dtype)], dim=1),
        scale=trained.scale,
    )


def check_same_shape(trained: CheckedAdapter, first: CheckedAdapter, name: str) -> None:
    """Refuses an initial adapter that cannot be the start of the trained one."""
    ours, theirs = (
        {module.target.path: (module.rank, module.scale) for module in adapter.modules}
        for adapter in (trained, first)
    )
    odd = sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
    if odd:
        raise AdapterRefused(
            RefusalCode.WRONG_RANK,
            f"{name} is not the initial state of this adapter: modules, ranks or scales differ, "
            f"such as {name_some(odd)}.",
            fix=HOW_TO_SAVE_INITIAL,
        )


def _read_rewritten(files: RewrittenFiles) -> CheckedAdapter:
    fields: Mapping[str, object] = {**files.fields, "init_lora_weights": True}
    with tempfile.TemporaryDirectory(prefix="loramux-convert-") as folder:
        write_files(Path(folder), fields, files.tensors)
        return read_without_base(Path(folder))
