"""Reads an adapter folder without its base: modules and shapes are taken from the weights file."""

from __future__ import annotations

from pathlib import Path

from loramux.adapters.identity import compute_cid, make_manifest
from loramux.adapters.peft.config import PeftLoraConfig, read_config
from loramux.adapters.peft.folder import open_folder
from loramux.adapters.peft.matching import MatchedTensors
from loramux.adapters.peft.names import FileTensors, Role, classify
from loramux.adapters.peft.reader import CheckedAdapter, check_values
from loramux.adapters.peft.refusals import name_some
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.adapters.peft.targets import plan_modules
from loramux.adapters.peft.tensors import (
    LAYER_NUMBER,
    Pair,
    check_rank,
    check_same_modules,
    check_shapes,
    pair_up,
)
from loramux.adapters.peft.tokenizer_files import digest_tokenizer_files
from loramux.adapters.peft.vocabulary import PATHS
from loramux.adapters.peft.weights import open_weights
from loramux.adapters.values import rank_maxima
from loramux.errors import AdapterRefused
from loramux.types.model import TargetModule

PARTS_BESIDE = "parts_beside"
_NEEDING_BASE = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
)


def read_without_base(folder: Path) -> CheckedAdapter:
    """Read, check and hash an adapter folder; its base need not be known.

    It makes the checks of `read_adapter`, except for those that need the base: that the modules
    exist there with these shapes, and that no targeted module of the base lacks tensors. Parts
    beside the low rank of linear layers are refused, because they need the base.
    """
    path = open_folder(Path(folder))
    config = read_config(path)
    with open_weights(path) as weights:
        file = classify(weights.entries)
        refuse_parts_beside(config, file)
        pairs = pair_up(file)
        check_shapes(pairs, {})
        targets = [_target_in_file(name, pair) for name, pair in pairs.items()]
        check_shapes(pairs, {target.path: target for target in targets})
        targets.sort(key=lambda target: (target.layer, target.path))
        plans = plan_modules(config, targets)
        check_same_modules(pairs, plans)
        for plan in plans:
            check_rank(pairs[plan.target.path], plan, None)
        loaded = weights.load()
    matched = MatchedTensors(plans, tuple(pairs[plan.target.path] for plan in plans), file.unused)
    modules = matched.make_parts(loaded.tensors, None).modules
    files = {WEIGHTS_NAME: loaded.digest, **digest_tokenizer_files(path)}
    manifest = make_manifest(config.canonical(), files)
    return CheckedAdapter(
        cid=compute_cid(manifest),
        manifest=manifest,
        path=path,
        config=config,
        size_bytes=sum(entry.num_bytes for entry in matched.used),
        modules=modules,
        warnings=check_values(modules, [rank_maxima(module) for module in modules]),
        tensors_used=tuple(entry.name for entry in matched.used),
        tensors_unused=matched.unused,
    )


def refuse_parts_beside(config: PeftLoraConfig, file: FileTensors) -> None:
    beside = [name for name in _NEEDING_BASE if getattr(config, name)]
    beside += sorted(
        entry.name
        for role, entries in file.by_role.items()
        for path, entry in entries.items()
        if role not in (Role.LORA_A, Role.LORA_B) or path in PATHS
    )
    if beside:
        raise AdapterRefused(
            PARTS_BESIDE,
            "The adapter cannot be combined or converted, because it changes more than the "
            f"low rank of the decoder's linear layers: {name_some(beside)}.",
            fix="Serve it as it is.",
        )


def _target_in_file(path: str, pair: Pair) -> TargetModule:
    """Return the module with the shape that the tensors have."""
    number = LAYER_NUMBER.match(path)
    return TargetModule(
        path=path,
        layer=int(number[1]) if number else 0,
        projection=path.rpartition(".")[2],
        in_features=pair.a.shape[1],
        out_features=pair.b.shape[0],
    )
