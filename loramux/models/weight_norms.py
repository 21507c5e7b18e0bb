"""Frobenius norms of weights in a checkpoint, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def find_weight_norms(model: Path, paths: Iterable[str]) -> dict[str, float]:
    """Return the norms of the weights of these modules, by path.

    A module whose weight no safetensors file of the folder has under its own name is left out.
    """
    wanted = {f"{path}.weight": path for path in paths}
    norms: dict[str, float] = {}
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in wanted.keys() & set(tensors.keys()):
                    tensor = tensors.get_tensor(name)
                    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
                    norms[wanted[name]] = float(norm)
        # Whether the model can be read is for the probe to say.
        except (SafetensorError, OSError, RuntimeError):
            continue
    return norms
