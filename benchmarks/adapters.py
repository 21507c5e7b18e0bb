"""Adapters of given shapes with random weights, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from loramux.types.model import BaseModelInfo


def make_adapter(  # noqa: PLR0913
    folder: Path,
    base: BaseModelInfo,
    *,
    rank: int,
    seed: int,
    projections: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """All linear layers unless `projections` names some. B is small but not zero."""
    generator = torch.Generator().manual_seed(seed)
    targets = [t for t in base.targets if projections is None or t.projection in projections]
    tensors = {}
    for target in targets:
        a = torch.randn(rank, target.in_features, generator=generator)
        b = torch.randn(target.out_features, rank, generator=generator)
        key = f"base_model.model.{target.path}"
        tensors[f"{key}.lora_A.weight"] = (a / target.in_features**0.5).to(dtype)
        tensors[f"{key}.lora_B.weight"] = (b * 0.02).to(dtype)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({target.projection for target in targets}),
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
