"""DoRA: the rows of W + w * B @ A at given lengths, without a changed weight.

PEFT multiplies the delta by the weight w of a request before it takes the norm, so that a row of
the output is c(w) * (W x + w * B A x) with c(w) = magnitude / ||W + w * B A||.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loramux.adapters.peft.refusals import RefusalCode
from loramux.diffusion.adapter import LowRank
from loramux.diffusion.targets import Target
from loramux.errors import AdapterRefused

# A row that a weight turns into zero has no direction; PEFT divides by zero there.
_MIN_RATIO = 1e-12


def dora_rows(name: str, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
    """Return [3, out]: c(1) - 1, and the parts of the squared norm that grow with w * w and w.

    They are small, so that a narrow type holds them well. Raises AdapterRefused.
    """
    base = weight.detach().flatten(1).float()
    a, b, magnitude = (part.to(base.device, torch.float32) for part in (a.flatten(1), b, magnitude))
    total = torch.addmm(base, b, a).square().sum(1)
    along = (base @ a.T * b).sum(1)
    own = (b @ (a @ a.T) * b).sum(1)
    rows = torch.stack((magnitude / total.sqrt() - 1, own / total, along / total)).cpu()
    if not bool(torch.isfinite(rows).all()):
        raise AdapterRefused(
            RefusalCode.NOT_FINITE,
            f"{name} has a DoRA magnitude of a row of W + B @ A that is zero.",
            fix="Train it again with a lower learning rate.",
        )
    return rows


def dora_factors(rows: Tensor, weight: float) -> Tensor:
    """Return c(weight) in float32, [out]."""
    gain, own, along = rows.float().unbind()
    ratio = 1 + (weight * weight - 1) * own + 2 * (weight - 1) * along
    factors: Tensor = (1 + gain) * ratio.clamp_min(_MIN_RATIO).rsqrt()
    return factors


def add_dora(module: Target, x: Tensor, y: Tensor, pair: LowRank, weight: float) -> None:
    """Turn the module's outputs y for the inputs x into those with the adapter."""
    assert pair.dora is not None
    factors = dora_factors(pair.dora, weight)
    base = y
    delta = pair.outputs(module, x)
    if isinstance(module, nn.Conv2d):
        factors = factors[:, None, None]
    if module.bias is not None:
        base = y - module.bias.view(factors.shape)
    y.add_(base * (factors - 1).to(y.dtype) + delta * (weight * factors).to(y.dtype))
