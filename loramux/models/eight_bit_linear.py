"""Linear layers over FP8 weights, which the tensor cores of a GPU multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import ALL_ROWS, LinearMethod, Slot
from loramux.kernels.quantised_ops import CodedRows, EightBitWeight, QuantisedGemmOps
from loramux.models.layers import Linear, empty_parameter
from loramux.models.quantised.checkpoint import PackedRead
from loramux.models.quantised.eight_bit import fp8_codes
from loramux.models.slots import FLOAT_DTYPES, check_tensor, in_row_order, whole
from loramux.types.model import LinearSpec, Projection, RowMap
from loramux.types.quantisation import Fp8Format

LARGEST_CODE = 448.0
CODES = torch.float8_e4m3fn
# The library's GEMMs take inputs and outputs in multiples of this.
_ALIGNMENT = 16
_BLOCK_INPUTS = 128
_NAN = 0x7F
# Split-K of a linear whose outputs are too few for all SMs.
_NUM_SPLITS = 2
_MAX_SPLIT_OUTPUTS = 8192
_SPLIT_INPUTS = 512


@dataclass(frozen=True, slots=True)
class EightBitSlot:
    """Takes the rows of a projection as codes with scales, or quantises them."""

    codes: Tensor
    scales: Tensor
    row_map: RowMap | None

    def fill(self, name: str, tensor: Tensor) -> None:
        check_tensor(name, tensor, tuple(self.codes.shape), FLOAT_DTYPES)
        rows = in_row_order(tensor, self.row_map).to(self.codes.device, torch.float32)
        largest = rows.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / LARGEST_CODE)
        self.scales.copy_(scales)
        self.codes.copy_((rows / scales).to(CODES))

    def fill_packed(self, read: PackedRead) -> None:
        assert isinstance(read.weight_format, Fp8Format)
        codes, scales = fp8_codes(read.parts, read.weight_format)
        check_tensor(f"{read.parts.module}.weight", codes, tuple(self.codes.shape), (CODES,))
        has_nan = bool(((codes.view(torch.uint8) & _NAN) == _NAN).any())
        if has_nan or not bool(scales.isfinite().all()):
            raise read.parts.damaged()
        self.codes.copy_(in_row_order(codes.view(torch.uint8), self.row_map).view(CODES))
        scales = scales.expand(len(codes), -1)
        self.scales.copy_(in_row_order(scales, self.row_map))


class EightBitLinear(nn.Module):
    """Computes with the weight codes * scales; inputs are rounded to FP8 as well, or not."""

    def __init__(
        self,
        spec: LinearSpec,
        ops: QuantisedGemmOps,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rounds_inputs: bool,
        group: int | None = None,
    ) -> None:
        """Make a linear without weights.

        rounds_inputs: multiply the codes of inputs, at a scale per token
        group: inputs of an output that share a scale; None: all
        """
        super().__init__()
        self.in_features, self.out_features = spec.in_features, spec.num_outputs
        self.dtype = dtype
        self.rounds_inputs = rounds_inputs
        rows = self.out_features
        self.codes = empty_parameter(rows, self.in_features, dtype=CODES, device=device)
        group = self.in_features if group is None else group
        num_groups = -(-self.in_features // group)
        self.scales = empty_parameter(rows, num_groups, dtype=torch.float32, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if spec.has_bias else None
        self.weight = EightBitWeight(self.codes.data, self.scales.data, group)
        self._ops = ops

    @classmethod
    def supports(cls, spec: LinearSpec, block: tuple[int, int] | None) -> bool:
        is_aligned = spec.in_features % _ALIGNMENT == 0 and spec.num_outputs % _ALIGNMENT == 0
        return is_aligned and (block is None or block[1] == _BLOCK_INPUTS)

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        rows, row_map = projection.rows, projection.row_map
        found: dict[str, Slot] = {
            "weight": EightBitSlot(self.codes.data[rows], self.scales.data[rows], row_map)
        }
        if self.bias is not None:
            found["bias"] = whole(self.bias[rows], row_map)
        return found

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        return self.weight.dequantised(rows).to(self.dtype)

    @property
    def gemm_key(self) -> str:
        if self.scales.shape[1] > 1:
            return "FP8 weights in groups"
        return "FP8" if self.rounds_inputs else "FP8 weights"

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
        x, ops = x.contiguous(), self._ops
        if len(x) > ops.MAX_ROWS:
            y = self._multiply_many(x)
        else:
            y = x.new_empty(len(x), self.out_features)
            if len(x) <= ops.VECTOR_ROWS:
                ops.multiply_vectors(x, self.weight, y, rounds=self.rounds_inputs)
            else:
                ops.multiply_eight_bit(self._coded(x), self.weight, y)
        return y if self.bias is None else y.add_(self.bias)

    def partial_sums(self, x: Tensor) -> Tensor:
        """Compute `forward`, or float32 [splits, rows, outputs] where split-K is faster."""
        ops = self._ops
        is_split = (
            ops.VECTOR_ROWS < len(x) <= ops.MAX_ROWS
            and self.bias is None
            and self.out_features <= _MAX_SPLIT_OUTPUTS
            and self.in_features % _SPLIT_INPUTS == 0
        )
        if not is_split:
            return self.forward(x)
        sums = x.new_empty(_NUM_SPLITS, len(x), self.out_features, dtype=torch.float32)
        ops.multiply_eight_bit(self._coded(x.contiguous()), self.weight, sums)
        return sums

    def _coded(self, x: Tensor) -> CodedRows:
        return self._ops.quantise_rows(x, terms=1 if self.rounds_inputs else 2)

    def _multiply_many(self, x: Tensor) -> Tensor:
        if self.rounds_inputs:
            return self._ops.multiply_many(x, self.weight)
        dense = x.new_empty(self.out_features, self.in_features)
        self._ops.dequantise(self.weight, dense)
        return F.linear(x, dense)
