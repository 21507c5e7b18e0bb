"""Linear layers on CPU with a second, packed copy of the weight that is read faster."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import DenseWeight, LinearMethod
from loramux.kernels.ops import PackedMatrix
from loramux.kernels.select import select_jit_gemm
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear

SITES = ("qkv", "o", "gate_up", "down")
# A single row is a vector product, which the plain weight serves 1.3 to 2.5 times as fast; in
# bfloat16 the packed one does (AMX: 1.2 to 3 times), and with the bits of up to 32 rows.
MAX_PLAIN_ROWS = 1
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """A linear layer with a dense weight and a copy in the panel layout of the CPU GEMM."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.matrix: PackedMatrix | None = None
        """For the compiled product; None: oneDNN computes it, from `packed`."""
        self.packed: Tensor | None = None
        self.max_plain_rows = 0 if linear.weight.dtype == torch.bfloat16 else MAX_PLAIN_ROWS
        self._gemm = select_jit_gemm(linear.weight.dtype)
        if self._gemm is not None:
            self.matrix = self._gemm.pack(linear.weight.data, linear.bias)
        else:
            weight = linear.weight.data
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    @property
    def dense(self) -> DenseWeight:
        return DenseWeight(self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight.nbytes

    def with_weight(self, weight: Tensor) -> LinearMethod:
        return PackedLinear(Linear.over(weight, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.max_plain_rows:
            return F.linear(x, self.weight, self.bias)
        if self._gemm is not None and self.matrix is not None:
            return self._gemm.multiply(x, self.matrix)
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""),
        )

    def matrix_for(self, num_rows: int) -> PackedMatrix | None:
        """What a compiled product of so many rows reads; None: `forward` has a faster way."""
        return None if num_rows <= self.max_plain_rows else self.matrix


def pack_linears(decoder: Decoder, *, byte_limit: int) -> int:
    """Pack what fits into `byte_limit`, the first layers first. Returns the bytes it took."""
    if not can_pack(decoder.dtype, decoder.norm.weight.device):
        return 0
    sites = [(layer, site) for layer in decoder.layers for site in SITES]
    num_bytes = 0
    for owner, site in [*sites, (decoder, "lm_head")]:
        linear = getattr(owner, site)
        if type(linear) is not Linear or num_bytes + linear.weight.nbytes > byte_limit:
            continue
        setattr(owner, site, PackedLinear(linear))
        num_bytes += linear.weight.nbytes
    return num_bytes


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    operations = torch.ops.mkldnn
    if device.type != "cpu" or not hasattr(operations, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(operations._is_mkldnn_fp16_supported())
    return dtype == torch.float32
