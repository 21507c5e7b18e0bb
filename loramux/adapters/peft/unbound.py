"""Reads an adapter folder without its base: modules and shapes are taken from the weights file."""

from __future__ import annotations

from pathlib import Path

from loramux.adapters.identity import compute_cid, make_manifest
from loramux.adapters.peft.config import read_config
from loramux.adapters.peft.folder import open_folder
from loramux.adapters.peft.reader import CheckedAdapter, check_values
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.adapters.peft.targets import plan_modules
from loramux.adapters.peft.tensors import (
    LAYER_NUMBER,
    UNUSED_NAME,
    MatchedTensors,
    Pair,
    check_rank,
    check_same_modules,
    check_shapes,
    pair_up,
)
from loramux.adapters.peft.tokenizer_files import digest_tokenizer_files
from loramux.adapters.peft.weights import open_weights
from loramux.adapters.values import rank_maxima
from loramux.types.model import TargetModule


def read_without_base(folder: Path) -> CheckedAdapter:
    """Reads, checks and hashes an adapter folder; its base need not be known.

    It makes the checks of `read_adapter`, except for those that need the base: that the modules
    exist there with these shapes, and that no targeted module of the base lacks tensors.
    """
    path = open_folder(Path(folder))
    config = read_config(path)
    with open_weights(path) as weights:
        unused = [entry.name for entry in weights.entries if UNUSED_NAME.fullmatch(entry.name)]
        pairs = pair_up(entry for entry in weights.entries if entry.name not in unused)
        check_shapes(pairs, {})
        targets = [_target_in_file(name, pair) for name, pair in pairs.items()]
        check_shapes(pairs, {target.path: target for target in targets})
        targets.sort(key=lambda target: (target.layer, target.path))
        plans = plan_modules(config, targets)
        check_same_modules(pairs, plans)
        for plan in plans:
            check_rank(pairs[plan.target.path], plan, None)
        loaded = weights.load()
    matched = MatchedTensors(plans, tuple(pairs[plan.target.path] for plan in plans), tuple(unused))
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


def _target_in_file(path: str, pair: Pair) -> TargetModule:
    """Returns the module with the shape that the tensors have."""
    number = LAYER_NUMBER.match(path)
    return TargetModule(
        path=path,
        layer=int(number[1]) if number else 0,
        projection=path.rpartition(".")[2],
        in_features=pair.a.shape[1],
        out_features=pair.b.shape[0],
    )
