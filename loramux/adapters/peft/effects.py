"""The size of what each part of an adapter changes, as Frobenius norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from loramux.adapters.packed.extras import EMBEDDING, ExtraKey, ExtraKind
from loramux.adapters.peft.parts import ExtraTensor, LoraModule


def low_rank_norm(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ||b @ a|| of b [out, rank] and a [rank, in], from their Gram matrices.

    ||b a||^2 is the sum of (b^T b) * (a a^T), both [rank, rank]: b a is never made.
    """
    a, b = a.double(), b.double()
    squared = float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(0.0, squared))


def module_norm(module: LoraModule) -> float:
    """Return ||scale * B A|| of a linear layer."""
    return abs(module.scale) * low_rank_norm(module.a, module.b)


def extra_norms(extras: Sequence[ExtraTensor]) -> dict[ExtraKey, float]:
    """Return the norm of each part; of low rank, that of both matrices multiplied."""
    values = {part.key: part.values for part in extras}
    norms: dict[ExtraKey, float] = {}
    for key, tensor in values.items():
        layer, module, kind = key
        if kind in (ExtraKind.LOW_RANK_A, ExtraKind.LOW_RANK_B):
            other = (layer, module, _other_half(kind))
            if other in values:
                # The embedding looks A up by token, so that its A is the tall matrix.
                is_a = (kind is ExtraKind.LOW_RANK_A) != (module == EMBEDDING)
                wide, tall = (tensor, values[other]) if is_a else (values[other], tensor)
                norms[key] = low_rank_norm(wide, tall)
            continue
        norms[key] = float(torch.linalg.vector_norm(tensor.double()))
    return norms


def _other_half(kind: ExtraKind) -> ExtraKind:
    return ExtraKind.LOW_RANK_B if kind is ExtraKind.LOW_RANK_A else ExtraKind.LOW_RANK_A
