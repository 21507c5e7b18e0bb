"""Types and Protocol of GEMMs over quantised weights on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class CodedRows(NamedTuple):
    """Rows of x as e4m3 codes: x = (codes[0] + codes[1] / 16) * scale."""

    codes: Tensor
    """[terms, rows, inputs] float8_e4m3fn; one or two terms"""
    scales: Tensor
    """[rows] float32; NaN for a row with NaN or infinity"""
    sums: Tensor | None
    """[groups, rows] float32: sums of the codes of each group of inputs"""


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    """weight = codes * scale of the group."""

    codes: Tensor
    """[outputs, inputs] float8_e4m3fn"""
    scales: Tensor
    """[outputs, groups] float32"""

    group: int
    """Inputs of a group; the last one of an output may have fewer."""

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Return the rows in float32."""
        codes, scales = self.codes[rows].float(), self.scales[rows]
        if scales.shape[1] == 1:
            return codes.mul_(scales)
        wide = scales.repeat_interleave(self.group, dim=1)
        return codes.mul_(wide[:, : codes.shape[1]])


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """weight = (code - zero) * scale; group g of an output has inputs [g * group, (g + 1) * group).

    Byte j of a pair of groups holds the code of input j of the first group in its low bits, and
    that of input j of the second group in its high bits.
    """

    codes: Tensor
    """[outputs, inputs // 2] uint8"""
    scales: Tensor
    """[groups, outputs] int32: scale in the low 16 bits, zero point in the high ones, as float16"""
    group: int

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> FourBitWeight:
        """Pack codes [outputs, inputs] of 0 to 15; scales, zeros [outputs, groups]."""
        outputs, inputs = codes.shape
        pairs = codes.to(torch.uint8).view(outputs, inputs // (2 * group), 2, group)
        packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(outputs, inputs // 2)
        words = torch.stack((scales.half().t(), zeros.half().t()), dim=-1).contiguous()
        return cls(packed, words.view(torch.int32).squeeze(-1), group)

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Return the rows in float32."""
        packed = self.codes[rows]
        pairs = packed.view(len(packed), -1, self.group)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=2).view(len(packed), -1, self.group)
        scale, zero = (
            self.scales[:, rows]
            .t()
            .contiguous()
            .view(torch.float16)
            .view(len(packed), -1, 2)
            .float()
            .unbind(-1)
        )
        return ((codes.float() - zero[..., None]) * scale[..., None]).view(len(packed), -1)


class QuantisedGemmOps(Protocol):
    """y = x @ weight.T over quantised weights, without reading values from the device.

    y is [rows, outputs] in the dtype of x, or float32 [splits, rows, outputs] for partial sums.
    """

    MAX_ROWS: int
    """Rows that `multiply_eight_bit` takes."""
    MAX_FOUR_BIT_ROWS: int
    """Rows that `multiply_four_bit` takes."""
    VECTOR_ROWS: int
    """Rows that `multiply_vectors` takes."""

    def quantise_rows(self, x: Tensor, *, terms: int, group: int = 0) -> CodedRows: ...

    def multiply_eight_bit(self, x: CodedRows, weight: EightBitWeight, y: Tensor) -> None: ...

    def multiply_four_bit(self, x: CodedRows, weight: FourBitWeight, y: Tensor) -> None: ...

    def multiply_vectors(
        self, x: Tensor, weight: EightBitWeight, y: Tensor, *, rounds: bool
    ) -> None:
        """round: round x to e4m3 at the scale of its row, as one term of `quantise_rows` does."""

    def multiply_many(self, x: Tensor, weight: EightBitWeight) -> Tensor:
        """Return x @ weight.T for any number of rows, with x rounded to e4m3; one scale per output.

        x is float16 or bfloat16; inputs and outputs are multiples of 16.
        """

    def dequantise(self, weight: EightBitWeight | FourBitWeight, out: Tensor) -> None:
        """Write the weight to `out` [outputs, inputs]."""
