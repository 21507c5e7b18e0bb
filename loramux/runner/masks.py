"""Leaves out the tokens that the constraint of a row does not allow, before temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loramux.kernels.gpu.transfer import send
from loramux.types.step import SampleRow

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of some rows of logits."""

    places: list[int]
    words: Tensor
    """[places, words] int32: bit b of word w allows token 32 w + b."""

    def apply(self, logits: Tensor) -> None:
        """Set the logits of other tokens to -inf. logits [rows, vocab]"""
        bits = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        is_dropped = (self.words.unsqueeze(2) & bits == 0).flatten(1)[:, : logits.shape[1]]
        width = is_dropped.shape[1]
        if len(self.places) == logits.shape[0]:
            logits[:, :width].masked_fill_(is_dropped, -torch.inf)
            logits[:, width:] = -torch.inf
            return
        for place, dropped in zip(self.places, is_dropped, strict=True):
            logits[place, :width].masked_fill_(dropped, -torch.inf)
            logits[place, width:] = -torch.inf


def gather_masks(rows: Sequence[SampleRow], logits: Tensor) -> RowMasks | None:
    """Return the masks of these rows on the device of the logits; None if none has one."""
    places: list[int] = []
    words = []
    for place, row in enumerate(rows):
        allowed = None if row.constraint is None else row.constraint.allowed
        if allowed is not None and row.is_constrained:
            places.append(place)
            words.append(allowed)
    if not places:
        return None
    return RowMasks(places, send(torch.from_numpy(np.stack(words)), logits.device))
