"""Linear layers over 4-bit weights in groups, which the tensor cores of a GPU multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import ALL_ROWS, LinearMethod, Slot
from loramux.kernels.quantised_ops import FourBitWeight, QuantisedGemmOps
from loramux.models.layers import Linear, empty_parameter
from loramux.models.quantised.checkpoint import PackedRead
from loramux.models.quantised.integer import INTEGERS_OF
from loramux.models.slots import FLOAT_DTYPES, check_tensor, in_row_order, whole
from loramux.types.model import LinearSpec, Projection, RowMap

LARGEST_CODE = 15
GROUPS = (32, 64, 128)
"""Inputs of a group that the kernels take; a pair of groups shares its bytes."""
# Split-K of a linear whose output is added to the residual stream.
_NUM_SPLITS = 4


@dataclass(frozen=True, slots=True)
class FourBitSlot:
    """Takes the rows of a projection as codes with scales, or quantises them."""

    codes: Tensor
    """[rows, inputs // 2] uint8"""
    scales: Tensor
    """[groups, rows] int32"""
    group: int
    row_map: RowMap | None

    def fill(self, name: str, tensor: Tensor) -> None:
        """Quantise rows to codes of 0 to 15 between the least and the largest of each group."""
        check_tensor(name, tensor, (len(self.codes), 2 * self.codes.shape[1]), FLOAT_DTYPES)
        rows = in_row_order(tensor, self.row_map).to(self.codes.device, torch.float32)
        groups = rows.view(len(rows), -1, self.group)
        least = groups.amin(dim=2).clamp(max=0)
        largest = groups.amax(dim=2).clamp(min=0)
        scales = ((largest - least) / LARGEST_CODE).clamp(min=1e-6).half().float()
        zeros = (-least / scales).round().clamp(0, LARGEST_CODE)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, LARGEST_CODE)
        self._store(codes.view(rows.shape), scales, zeros)

    def fill_packed(self, read: PackedRead) -> None:
        integers = INTEGERS_OF[type(read.weight_format)](read.parts, read.weight_format)
        codes, scales, zeros = integers.codes, integers.scales.float(), integers.zeros
        name = f"{read.parts.module}.weight"
        check_tensor(name, codes, (len(self.codes), 2 * self.codes.shape[1]), (torch.uint8,))
        if integers.group_of is not None:
            raise UnsupportedModel(
                f"{name} orders its inputs by activation (g_idx), which config.json does not say: "
                "set desc_act to true there."
            )
        zeros = zeros.float() if isinstance(zeros, Tensor) else torch.full_like(scales, zeros)
        if not bool(scales.half().isfinite().all()):
            raise read.parts.damaged()
        in_order = (in_row_order(tensor, self.row_map) for tensor in (codes, scales, zeros))
        self._store(*in_order)

    def _store(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        packed = FourBitWeight.pack(codes, scales, zeros, self.group)
        self.codes.copy_(packed.codes)
        self.scales.copy_(packed.scales)


class FourBitLinear(nn.Module):
    """Computes with the weight (codes - zeros) * scales; inputs keep eight bits and more."""

    def __init__(
        self,
        spec: LinearSpec,
        ops: QuantisedGemmOps,
        *,
        group: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = spec.in_features, spec.num_outputs
        self.dtype = dtype
        rows, inputs = self.out_features, self.in_features
        self.codes = empty_parameter(rows, inputs // 2, dtype=torch.uint8, device=device)
        self.scales = empty_parameter(inputs // group, rows, dtype=torch.int32, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if spec.has_bias else None
        self.weight = FourBitWeight(self.codes.data, self.scales.data, group)
        self._ops = ops

    @classmethod
    def supports(cls, spec: LinearSpec, group: int) -> bool:
        return group in GROUPS and spec.in_features % (2 * group) == 0

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        rows, row_map = projection.rows, projection.row_map
        found: dict[str, Slot] = {
            "weight": FourBitSlot(
                self.codes.data[rows], self.scales.data[:, rows], self.weight.group, row_map
            )
        }
        if self.bias is not None:
            found["bias"] = whole(self.bias[rows], row_map)
        return found

    @property
    def gemm_key(self) -> str:
        return f"int4 in groups of {self.weight.group}"

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        return self.weight.dequantised(rows).to(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def merged_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize

    def with_weight(self, weight: Tensor) -> LinearMethod:
        """Make a dense linear: the sum of codes and deltas has no codes of these scales."""
        return Linear.over(weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self._ops.MAX_FOUR_BIT_ROWS:
            dense = x.new_empty(self.out_features, self.in_features)
            self._ops.dequantise(self.weight, dense)
            return F.linear(x, dense, self.bias)
        y = x.new_empty(len(x), self.out_features)
        self._multiply(x, y)
        return y if self.bias is None else y.add_(self.bias)

    def partial_sums(self, x: Tensor) -> Tensor:
        """Compute `forward`, or float32 [splits, rows, outputs] where split-K is faster."""
        depth = 2 * self.weight.group * _NUM_SPLITS
        is_small = len(x) <= self._ops.MAX_FOUR_BIT_ROWS
        if not is_small or self.bias is not None or self.in_features % depth:
            return self.forward(x)
        sums = x.new_empty(_NUM_SPLITS, len(x), self.out_features, dtype=torch.float32)
        self._multiply(x, sums)
        return sums

    def _multiply(self, x: Tensor, y: Tensor) -> None:
        coded = self._ops.quantise_rows(x.contiguous(), terms=2, group=self.weight.group)
        self._ops.multiply_four_bit(coded, self.weight, y)
