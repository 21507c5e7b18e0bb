"""The nine LoRA decode batches in which loramux is compared with other servers' kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANK = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A decode batch: its tokens, the linear layers with LoRA, and the popularity of adapters."""

    num_tokens: int
    sites: str
    """Either "qkvo" or "all"."""
    popularity: str
    """One of "identical", "skewed" (Zipf 1.5) and "distinct"."""
    goal_us: float
    """The goal for the LoRA overhead per decoder layer."""

    def adapters(self) -> Tensor:
        """Return the adapter index of each token, sorted as the runner sorts tokens."""
        if self.popularity == "identical":
            return torch.zeros(self.num_tokens, dtype=torch.long)
        if self.popularity == "distinct":
            return torch.arange(self.num_tokens)
        generator = torch.Generator().manual_seed(0)
        weights = 1.0 / torch.arange(1, self.num_tokens + 1, dtype=torch.float64) ** 1.5
        ids = torch.multinomial(weights, self.num_tokens, True, generator=generator)
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
