"""Linear layers whose weight is stored as int8 codes with a scale per output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import ALL_ROWS, LinearMethod, Slot
from loramux.models.layers import Linear, empty_parameter
from loramux.models.slots import FLOAT_DTYPES, check_tensor, in_row_order, whole
from loramux.types.model import LinearSpec, Projection, RowMap

LARGEST_CODE = 127
# Rows that are dequantised at once: a weight is never held in floating point as a whole.
_BLOCK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Int8Slot:
    """Quantises the rows of a projection when they are read."""

    codes: Tensor
    scales: Tensor
    row_map: RowMap | None

    def fill(self, name: str, tensor: Tensor) -> None:
        check_tensor(name, tensor, tuple(self.codes.shape), FLOAT_DTYPES)
        rows = in_row_order(tensor, self.row_map).to(self.codes.device, torch.float32)
        largest = rows.abs().amax(dim=1)
        # A row of zeros has codes of 0 at any scale.
        scales = torch.where(largest == 0, 1.0, largest / LARGEST_CODE)
        self.scales.copy_(scales)
        self.codes.copy_((rows / scales[:, None]).round_())


class Int8Linear(nn.Module):
    """Computes with the weight codes * scales in the dtype of the input.

    Weight-only, symmetric: rows of dequantised weights are exact products of a code and its scale.
    """

    gemm_key = "int8"

    def __init__(
        self, spec: LinearSpec, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = spec.in_features, spec.num_outputs
        self.dtype = dtype
        rows = self.out_features
        self.codes = empty_parameter(rows, self.in_features, dtype=torch.int8, device=device)
        self.scales = empty_parameter(rows, dtype=torch.float32, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if spec.has_bias else None

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        rows, row_map = projection.rows, projection.row_map
        found: dict[str, Slot] = {
            "weight": Int8Slot(self.codes.data[rows], self.scales.data[rows], row_map)
        }
        if self.bias is not None:
            found["bias"] = whole(self.bias[rows], row_map)
        return found

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        return (self.codes[rows].float() * self.scales[rows, None]).to(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def merged_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize

    def with_weight(self, weight: Tensor) -> LinearMethod:
        """Make a dense linear: the sum of codes and deltas has no int8 codes of these scales."""
        return Linear.over(weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self.out_features)
        for start in range(0, self.out_features, _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            bias = None if self.bias is None else self.bias[rows]
            y[..., rows] = F.linear(x, self.dequantised_rows(rows), bias)
        return y
