"""Batches of rows on adapters: the nine in which peers' LoRA kernels were compared, and others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANK = 16


@dataclass(frozen=True, slots=True)
class Case:
    num_rows: int
    sites: str
    """qkvo or all"""
    popularity: str
    """identical, skewed (Zipf 1.5) or distinct"""
    goal_us: float
    """Per decoder layer."""

    def adapters(self) -> Tensor:
        """[rows] the adapter of each row, sorted as the runner sorts rows."""
        if self.popularity == "identical":
            return torch.zeros(self.num_rows, dtype=torch.long)
        if self.popularity == "distinct":
            return torch.arange(self.num_rows)
        generator = torch.Generator().manual_seed(0)
        weights = 1.0 / torch.arange(1, self.num_rows + 1, dtype=torch.float64) ** 1.5
        ids = torch.multinomial(weights, self.num_rows, True, generator=generator)
        return torch.unique(ids, return_inverse=True)[1].sort().values

    @property
    def num_adapters(self) -> int:
        return int(self.adapters().max()) + 1


CASES = (
    Case(1, "qkvo", "identical", 6),
    Case(1, "all", "identical", 12),
    Case(32, "qkvo", "identical", 6),
    Case(32, "qkvo", "distinct", 15),
    Case(32, "all", "skewed", 16),
    Case(32, "all", "distinct", 40),
    Case(256, "qkvo", "skewed", 25),
    Case(256, "all", "skewed", 60),
    Case(256, "all", "distinct", 240),
)
