"""Hidden states by row, and vectors pooled from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loramux.runner.batch import LogitsOf
from loramux.runner.row_uses import NOT_FINITE, RowUses
from loramux.types.pooling import Pooling


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The normed hidden states of some rows of a step."""

    hidden: Tensor
    """[rows, hidden]"""
    rows: Sequence[int] | None
    """Ascending; None: all rows of the step."""

    def of(self, rows: Sequence[int]) -> Tensor:
        """Return the hidden states of these rows, which must be among those that there are."""
        if self.rows is not None and len(rows) == len(self.rows):
            return self.hidden
        if self.rows is None and isinstance(rows, range):
            return self.hidden[rows.start : rows.stop]
        found = torch.tensor(rows, device=self.hidden.device)
        if self.rows is not None:
            found = torch.searchsorted(torch.tensor(self.rows, device=found.device), found)
        return self.hidden.index_select(0, found)


def pool(
    uses: RowUses, states: HiddenRows, outputs: LogitsOf, failed: dict[int, str]
) -> dict[int, NDArray[np.float64]]:
    """Compute what the pooled rows ask for, by sequence, in one transfer to the host.

    `outputs`: of the head, for chunks that pool it.
    `failed` receives the sequences with a NaN or infinite number, or a hidden state of zeros.
    """
    vectors = []
    for _, rows, pooling in uses.pooled:
        some = states.of(rows)
        # The RMSNorm of values whose squares overflow is 0, which would look like a result.
        least = some.abs().amax(dim=-1).amin().unsqueeze(0)
        if pooling is Pooling.HEAD:
            some = outputs(some, rows)
        # In float64, so that the sum does not depend on where chunks end.
        vectors.append(torch.cat([least.double(), some.sum(dim=0, dtype=torch.float64)]))
    on_host = torch.cat(vectors).cpu().numpy() if vectors else np.zeros(0)
    pooled, start = {}, 0
    for (chunk, _, _), vector in zip(uses.pooled, vectors, strict=True):
        least, *_ = found = on_host[start : start + len(vector)]
        start += len(vector)
        pooled[chunk.sequence_id] = found[1:]
        if least == 0 or not np.isfinite(found).all():
            failed[chunk.sequence_id] = NOT_FINITE
    return pooled
