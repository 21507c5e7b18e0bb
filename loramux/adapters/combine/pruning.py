"""Pruning of task tensors, by magnitude and at random, with results that platforms share."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from loramux.base.canonical_json import canonical_json

MASK_CHUNK = 2**22
MASK_FORMAT = "loramux-dare/1"


def keep_largest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    """Set all but the int(density * numel) elements of largest magnitude to zero.

    Of equal magnitudes the first elements are kept; PEFT leaves this choice to torch.topk.
    """
    if density >= 1:
        return tensor
    flat = tensor.reshape(-1)
    num_kept = int(density * flat.numel())
    if num_kept == 0:
        return torch.zeros_like(tensor)
    sizes = flat.abs()
    # kthvalue counts from the smallest.
    threshold = sizes.kthvalue(flat.numel() - num_kept + 1).values
    kept = sizes > threshold
    equal = (sizes == threshold).nonzero().reshape(-1)
    kept[equal[: num_kept - int(kept.sum())]] = True
    return torch.where(kept, flat, torch.zeros_like(flat)).reshape(tensor.shape)


def keep_random(tensor: torch.Tensor, density: float, key: bytes) -> torch.Tensor:
    """Keep each element with probability `density` and divides it by `density`."""
    if density >= 1:
        return tensor
    kept = random_mask(tensor.numel(), density, key).reshape(tensor.shape)
    return torch.where(kept, tensor, torch.zeros_like(tensor)) / density


def random_mask(size: int, density: float, key: bytes) -> torch.Tensor:
    """Return bits that are set with probability `density`, a pure function of the arguments.

    The bits come from Philox, a counter-based generator, so that they depend neither on the number
    of threads nor on the platform.
    """
    generator = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    limit = np.uint64(min(int(density * 2**64), 2**64 - 1))
    mask = np.empty(size, dtype=np.bool_)
    for start in range(0, size, MASK_CHUNK):
        chunk = mask[start : start + MASK_CHUNK]
        np.less(generator.random_raw(len(chunk)), limit, out=chunk)
    return torch.from_numpy(mask)


def mask_key(seed: int, cid: str, path: str, tensor: str) -> bytes:
    """Return the key of the mask of one tensor ("A", "B" or "delta") of a module of a part."""
    return hashlib.sha256(canonical_json([MASK_FORMAT, seed, cid, path, tensor])).digest()
