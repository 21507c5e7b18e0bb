"""The digest of a pipeline's weights, and that of an image's pixels."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


def pipeline_digest(pipe: Any) -> str:
    """Return sha256:<hex> over the names, types, shapes and bytes of all weights."""
    total = hashlib.sha256(type(pipe).__name__.encode())
    for name, part in sorted(pipe.components.items()):
        if not isinstance(part, nn.Module):
            continue
        for key, tensor in sorted(part.state_dict().items()):
            total.update(f"{name}.{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
            total.update(_bytes(tensor))
    return f"sha256:{total.hexdigest()}"


def to_bytes(pixels: Tensor) -> Tensor:
    """Round [height, width, 3] in [0, 1] to bytes as diffusers does."""
    return (pixels * 255).round().to(torch.uint8)


def pixel_digest(image: Tensor) -> str:
    """Return sha256:<hex> over the size and the bytes of an image of [height, width, 3] bytes."""
    height, width, _ = image.shape
    total = hashlib.sha256(f"{width}x{height} rgb8\n".encode())
    total.update(_bytes(image))
    return f"sha256:{total.hexdigest()}"


def _bytes(tensor: Tensor) -> memoryview:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return raw.numpy().data
