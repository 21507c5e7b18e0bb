"""PEFT's combination methods for one module: A and B of the parts in, A and B of the result out.

All arithmetic is in float64 and is rounded once, at the end. The result has scale 1. The formulas
are those of `add_weighted_adapter` in PEFT 0.21; docs/merging.md states them in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.combine.pruning import keep_largest, keep_random, mask_key
from loramux.adapters.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class ModulePart:
    """The LoRA of one part in the module that is combined."""

    cid: str
    weight: float
    scale: float
    a: torch.Tensor
    b: torch.Tensor

    @property
    def factor(self) -> float:
        """The factor of B @ A in the weighted sum of the deltas."""
        return self.weight * self.scale

    @property
    def delta(self) -> torch.Tensor:
        return (self.b.double() @ self.a.double()).mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The low-rank factors of a combined module: it adds b @ a to the weight."""

    a: torch.Tensor
    b: torch.Tensor


def combine_module(
    recipe: Recipe, path: str, parts: Sequence[ModulePart], *, svd_rank: int
) -> Factors:
    """Combine the parts that have the module, in the order of the recipe, in float64."""
    method = recipe.method
    if method.name == "cat":
        return concatenate(parts)
    if method.name == "svd":
        return cut_sum(parts, svd_rank)
    if method.on_deltas:
        prune = pruner(recipe, path, "delta")
        deltas = [prune(part, part.delta) for part in parts]
        return cut_delta(add_up(recipe, deltas, [part.weight for part in parts]), svd_rank)
    # The sign of a negative factor goes into A alone.
    roots = [math.sqrt(abs(part.factor)) for part in parts]
    signed = [math.copysign(root, part.factor) for root, part in zip(roots, parts, strict=True)]
    prune_a, prune_b = pruner(recipe, path, "A"), pruner(recipe, path, "B")
    return Factors(
        a=add_up(recipe, [prune_a(part, part.a.double()) for part in parts], signed),
        b=add_up(recipe, [prune_b(part, part.b.double()) for part in parts], roots),
    )


def concatenate(parts: Sequence[ModulePart]) -> Factors:
    """Return the exact weighted sum of the deltas; the ranks add up.

    Parts of weight 0 take no rank.
    """
    used = [part for part in parts if part.factor != 0] or list(parts[:1])
    return Factors(
        a=torch.cat([part.a.double() * part.factor for part in used], dim=0),
        b=torch.cat([part.b.double() for part in used], dim=1),
    )


def pruner(
    recipe: Recipe, path: str, name: str
) -> Callable[[ModulePart, torch.Tensor], torch.Tensor]:
    density, seed = recipe.density, recipe.seed
    if density is None:
        return lambda part, tensor: tensor
    if seed is None:
        return lambda part, tensor: keep_largest(tensor, density)
    return lambda part, tensor: keep_random(tensor, density, mask_key(seed, part.cid, path, name))


def add_up(
    recipe: Recipe, tensors: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Return the weighted sum, with TIES of the elements that have the elected sign."""
    if recipe.majority_sign_method is None:
        total = torch.zeros_like(tensors[0])
        for tensor, weight in zip(tensors, weights, strict=True):
            total.add_(tensor, alpha=weight)
        return total
    votes = torch.zeros_like(tensors[0])
    for tensor in tensors:
        votes += tensor if recipe.majority_sign_method == "total" else tensor.sign()
    # A vote of 0 elects plus, and an element that is 0 has neither sign.
    elected = torch.where(votes >= 0, 1.0, -1.0).to(votes.dtype)
    total, count = torch.zeros_like(votes), torch.zeros_like(votes)
    for tensor, weight in zip(tensors, weights, strict=True):
        agrees = tensor.sign() == elected
        total += torch.where(agrees, tensor * weight, 0.0)
        count += agrees
    return total / count.clamp_(min=1.0)


def cut_sum(parts: Sequence[ModulePart], rank: int) -> Factors:
    """Return the best approximation of rank `rank` of the weighted sum of the deltas.

    The sum is B @ A of the concatenation, so that only a matrix of the size of the added ranks is
    decomposed: B = Qb Rb, A = Ra^T Qa^T, and the SVD of Rb Ra^T is that of the sum.
    """
    whole = concatenate(parts)
    q_b, r_b = torch.linalg.qr(whole.b)
    q_a, r_a = torch.linalg.qr(whole.a.T)
    left, sizes, right = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    rank = min(rank, len(sizes))
    return with_fixed_signs(
        a=right[:rank] @ q_a.T, b=(q_b @ left[:, :rank]) * sizes[:rank].unsqueeze(0)
    )


def cut_delta(delta: torch.Tensor, rank: int) -> Factors:
    """Return the best approximation of rank `rank` of a matrix.

    It decomposes the Gram matrix of the smaller side, which takes a fraction of the time of an SVD;
    in float64 the leading singular vectors are exact far beyond float32.
    """
    is_wide = delta.shape[0] <= delta.shape[1]
    wide = delta if is_wide else delta.T
    rank = min(rank, wide.shape[0])
    vectors = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:].flip(1)
    scaled = vectors.T @ wide
    sizes = scaled.norm(dim=1, keepdim=True)
    rows = scaled / torch.where(sizes > 0, sizes, 1.0)
    if is_wide:
        return with_fixed_signs(a=rows, b=vectors * sizes.T)
    return with_fixed_signs(a=vectors.T, b=(rows * sizes).T)


def with_fixed_signs(*, a: torch.Tensor, b: torch.Tensor) -> Factors:
    """Make the largest element of each row of A positive: an SVD leaves the signs open."""
    largest = a.gather(1, a.abs().argmax(dim=1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(a.dtype)
    return Factors(a=(a * signs).contiguous(), b=(b * signs.T).contiguous())
