"""LOKR: the delta is the Kronecker product of two matrices, each whole or of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loramux.adapters.peft.types.configs import LokrConfig
from loramux.adapters.peft.types.linear import LinearRule, LowRank, Targets, Tensors
from loramux.adapters.peft.types.lycoris import strengths
from loramux.adapters.peft.types.matching import Shape
from loramux.types.model import BaseModelInfo, TargetModule


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of the product: lokr_w1 or lokr_w2."""

    name: str
    shape: tuple[int, int]
    r: int | None
    """The rank of its two matrices; None: it is one matrix."""

    @property
    def shapes(self) -> dict[str, Shape]:
        rows, columns = self.shape
        if self.r is None:
            return {self.name: self.shape}
        return {f"{self.name}_a": (rows, self.r), f"{self.name}_b": (self.r, columns)}

    @property
    def rank(self) -> int:
        return min(self.shape) if self.r is None else min(self.r, *self.shape)

    def whole(self, tensors: Tensors) -> torch.Tensor:
        if self.r is None:
            return tensors[self.name]
        return tensors[f"{self.name}_a"] @ tensors[f"{self.name}_b"]

    def halves(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two matrices with the product of this factor and its rank between them."""
        if self.r is not None and self.r == self.rank:
            return tensors[f"{self.name}_a"], tensors[f"{self.name}_b"]
        whole, eye = self.whole(tensors), torch.eye(self.rank)
        return (eye, whole) if self.shape[0] <= self.shape[1] else (whole, eye)


class LokrRule(LinearRule):
    def __init__(self, config: LokrConfig, targets: Targets, base: BaseModelInfo) -> None:
        self._scales = {path: found.scale for path, found in strengths(config, targets).items()}
        ranks = {path: found.r for path, found in strengths(config, targets).items()}
        self._factors = {
            target.path: factors_of(config, target, ranks[target.path]) for target in targets
        }

    def shapes(self, target: TargetModule) -> Mapping[str, Shape]:
        first, second = self._factors[target.path]
        return first.shapes | second.shapes

    def rank(self, target: TargetModule) -> int:
        first, second = self._factors[target.path]
        return first.rank * second.rank

    def low_rank(self, target: TargetModule, tensors: Tensors) -> LowRank:
        """Use that kron(b1 a1, b2 a2) = kron(b1, b2) kron(a1, a2)."""
        (b1, a1), (b2, a2) = (factor.halves(tensors) for factor in self._factors[target.path])
        return LowRank(torch.kron(a1, a2), torch.kron(b1, b2), self._scales[target.path])

    def weight(self, target: TargetModule, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
        first, second = self._factors[target.path]
        delta = torch.kron(first.whole(tensors), second.whole(tensors))
        return base + delta * self._scales[target.path]


def factors_of(config: LokrConfig, target: TargetModule, r: int) -> tuple[Factor, Factor]:
    out_small, out_large = factorize(target.out_features, config.decompose_factor)
    in_small, in_large = factorize(target.in_features, config.decompose_factor)
    splits_first = config.decompose_both and r < max(out_small, in_small) / 2
    splits_second = r < max(out_large, in_large) / 2
    return (
        Factor("lokr_w1", (out_small, in_small), r if splits_first else None),
        Factor("lokr_w2", (out_large, in_large), r if splits_second else None),
    )


def factorize(size: int, factor: int) -> tuple[int, int]:
    """Split a size into two divisors as PEFT does: the first near `factor`, or to the root (-1).

    The first is the smaller one, unless `factor` divides the size.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = size if factor == -1 else factor
    small, large = 1, size
    while small < large:
        divisor = small + 1
        while size % divisor:
            divisor += 1
        if divisor + size // divisor > small + large or divisor > limit:
            break
        small, large = divisor, size // divisor
    return min(small, large), max(small, large)
