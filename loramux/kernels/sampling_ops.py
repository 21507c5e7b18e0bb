"""Types and Protocol of the ops that sample tokens on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of a step's logits that may take some tokens only."""

    rows: Tensor
    """[masked] int32"""
    masks: Tensor
    """[masked, words] int32: bit b of word w allows token 32 w + b; no token after the last word
    is allowed."""


class SamplingOps(Protocol):
    def choose_tokens(self, logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
        """One token per row: the argmax at temperature 0, else by inverse CDF in vocabulary order.

        logits [rows, vocab]   temperatures [rows] float32   noise [rows] float64 in [0, 1)
        returns [rows] int64: the token, plus 2^32 if a logit is NaN or +inf, or all are -inf
        """

    def choose_masked_tokens(
        self, logits: Tensor, temperatures: Tensor, noise: Tensor, masked: MaskedRows
    ) -> Tensor:
        """`choose_tokens` of some rows, as if the logits of other tokens were -inf: [masked]"""
