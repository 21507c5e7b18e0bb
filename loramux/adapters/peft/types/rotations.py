"""OFT, BOFT and HRA: the input of a layer is rotated, which is a rotation of its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.types.configs import BoftConfig, HraConfig, OftConfig
from loramux.adapters.peft.types.linear import LinearRule, Targets, Tensors
from loramux.adapters.peft.types.matching import Shape
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule


def rotate_inputs(weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the weight of a layer whose input x is x @ block_diag(blocks)."""
    tiles = weight.reshape(weight.shape[0], len(blocks), -1)
    return torch.einsum("onc,nkc->onk", tiles, blocks).reshape(weight.shape)


def cayley(skew: torch.Tensor) -> torch.Tensor:
    """Return (1 - skew) (1 + skew)^-1 of each matrix."""
    eye = torch.eye(skew.shape[-1]).expand_as(skew)
    rotation: torch.Tensor = torch.linalg.solve(eye + skew, eye - skew, left=False)
    return rotation


def cayley_series(skew: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Return the sum 1 + 2 s + 2 s^2 + ... + s^(n - 1) that PEFT has for n terms.

    The last power is not doubled from the third on, and three terms are taken for four.
    """
    rotation = torch.eye(skew.shape[-1]).repeat(len(skew), 1, 1)
    power = rotation
    last = 3 if num_terms == 3 else num_terms - 1
    for exponent in range(1, last + 1):
        power = power @ skew
        rotation = rotation + (power if exponent == last > 2 else 2 * power)
    return rotation


class OftRule(LinearRule):
    WEIGHT = "oft_R.weight"

    def __init__(self, config: OftConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._config = config

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        size = block_size(self._config, target.in_features)
        count = 1 if self._config.block_share else target.in_features // size
        return {self.WEIGHT: (count, size * (size - 1) // 2)}

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        size = block_size(self._config, target.in_features)
        upper = tensors[self.WEIGHT]
        skew = torch.zeros(len(upper), size, size)
        rows, columns = torch.triu_indices(size, size, 1)
        skew[:, rows, columns] = upper
        skew = skew - skew.mT
        if self._config.coft_eps is not None:
            skew = bound_norms(skew, self._config.coft_eps / math.sqrt(len(skew)))
        terms = self._config.cayley_terms
        blocks = cayley_series(skew, terms) if terms else cayley(skew)
        return rotate_inputs(base, blocks.expand(target.in_features // size, -1, -1))


def bound_norms(matrices: torch.Tensor, limit: float) -> torch.Tensor:
    norms = torch.linalg.matrix_norm(matrices)[:, None, None]
    return torch.where(norms <= limit, matrices, matrices * (limit / norms.clamp(min=limit)))


def block_size(config: OftConfig, in_features: int) -> int:
    if config.oft_block_size:
        return nearest_divisor(in_features, config.oft_block_size)
    return in_features // nearest_divisor(in_features, config.r)


def nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor that PEFT takes instead of `wanted`: the nearest, of two the lower."""
    if wanted >= size:
        return size
    higher = next(n for n in range(wanted, size + 1) if size % n == 0)
    lower = next(n for n in range(wanted, 0, -1) if size % n == 0)
    return lower if wanted - lower <= higher - wanted else higher


class BoftRule(LinearRule):
    def __init__(self, config: BoftConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._config = config
        for target in targets:
            divisor = config.boft_block_size or config.boft_block_num
            if target.in_features % divisor:
                raise AdapterRefused(
                    RefusalCode.BAD_VALUE,
                    f"{target.path} takes {target.in_features} features, which do not divide into "
                    f"blocks by {divisor}.",
                    fix="Serve the adapter on the base that it was trained on.",
                )

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        size = self._config.boft_block_size or target.in_features // self._config.boft_block_num
        return {
            "boft_R": (1, target.in_features // size, size, size),
            "boft_s": (target.out_features, 1),
        }

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        data = tensors["boft_R"][0]
        return tensors["boft_s"] * rotate_inputs(base, cayley(0.5 * (data - data.mT)))


class HraRule(LinearRule):
    """Multiplies the weight by one reflection for each column of `hra_u`."""

    def __init__(self, config: HraConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._config = config

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        return {"hra_u": (target.in_features, self._config.r)}

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        units: list[torch.Tensor] = []
        for column in tensors["hra_u"].T:
            if self._config.apply_gs:
                for earlier in units:
                    column = column - (earlier @ column) * earlier
            units.append(column / column.norm())
        if self._config.apply_gs:
            basis = torch.stack(units, dim=1)
            return base - 2 * (base @ basis) @ basis.T
        for unit in units:
            base = base - 2 * torch.outer(base @ unit, unit)
        return base
