"""DoRA: magnitudes that rescale the rows of W + scale * B @ A, as PEFT computes them."""

from __future__ import annotations

import torch

from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterRefused

# Rows of the base that are converted to float32 at once.
ROWS_AT_ONCE = 4096


def row_factors(
    path: str,
    weight: torch.Tensor,
    low_rank: tuple[torch.Tensor, torch.Tensor, float],
    magnitude: torch.Tensor,
) -> torch.Tensor:
    """Return magnitude / ||W + s * B @ A|| of each output row, in float32 on the CPU.

    `low_rank`: A [rank, in], B [out, rank] and the scale. B @ A is not formed: the squared norm is
    ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B> for each row.
    """
    a, b = (half.to(weight.device, torch.float32) for half in low_rank[:2])
    scale = low_rank[2]
    squares = []
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        w, b_rows = weight[rows].float(), b[rows].double()
        cross = ((w @ a.T).double() * b_rows).sum(1)
        own = (b_rows @ (a @ a.T).double() * b_rows).sum(1)
        squares.append(w.square().sum(1).double() + 2 * scale * cross + scale * scale * own)
    norm = torch.cat(squares).clamp_min(0).sqrt().float().cpu()
    return divide(path, magnitude, norm)


def column_factors(path: str, embedding: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Return magnitude / norm of each column of an embedding with its low rank added."""
    return divide(path, magnitude, torch.linalg.vector_norm(embedding.float(), dim=0).cpu())


def divide(path: str, magnitude: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    factors = magnitude.float().reshape(-1) / norm
    if not torch.isfinite(factors).all():
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"{path} has DoRA magnitudes that are not finite, or a row of W + B @ A that is zero.",
            fix="The training diverged, or this is not the base of the adapter.",
        )
    return factors
