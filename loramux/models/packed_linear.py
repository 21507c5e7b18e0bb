"""Linear layers with a second copy of the weight in a panel layout for CPU GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import ALL_ROWS, DENSE, LinearMethod, Slot, tile_padding
from loramux.kernels.ops import JitGemmOps, PackedMatrix
from loramux.kernels.select import select_jit_gemm
from loramux.models.architectures import linears_of
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear
from loramux.types.model import Projection

# A single token is a GEMV, 1.3 to 2.5 times as fast on the plain weight in float32; in bfloat16 the
# packed weight is faster (AMX: 1.2 to 3 times), with the same bits as a GEMM of up to 32 tokens.
MAX_PLAIN_ROWS = 1
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """A linear layer with a dense weight and a copy in the panel layout of the CPU GEMM."""

    def __init__(self, linear: Linear, *, packs_later: bool = False) -> None:
        """`packs_later`: compute on the dense weight until `pack` is called; float32 alone."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.matrix: PackedMatrix | None = None
        """Panels of the compiled GEMM; None if oneDNN computes it from `packed`."""
        self.packed: Tensor | None = None
        self.padding = tile_padding(linear.weight)
        """Columns of zeros that x and `packed` get for whole tiles."""
        is_plain = linear.weight.dtype != torch.bfloat16 and not self.padding
        self.max_plain_rows = MAX_PLAIN_ROWS if is_plain else 0
        self._gemm: JitGemmOps | None = None
        if not packs_later:
            self.pack()

    @property
    def is_packed(self) -> bool:
        return self.matrix is not None or self.packed is not None

    def pack(self) -> None:
        """Make the copy of the weight; the kernels that read it are compiled if necessary."""
        weight = self.weight.data
        self._gemm = select_jit_gemm(weight.dtype)
        if self._gemm is not None:
            self.matrix = self._gemm.pack(weight, self.bias)
        else:
            padded = F.pad(weight, (0, self.padding)) if self.padding else weight
            self.packed = torch.ops.mkldnn._reorder_linear_weight(padded, TYPICAL_ROWS)

    gemm_key = DENSE

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        raise TypeError("the weights are packed after they are read")

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        return self.weight[rows]

    @property
    def num_bytes(self) -> int:
        return (2 if self.is_packed else 1) * self.weight.nbytes

    @property
    def merged_bytes(self) -> int:
        return self.num_bytes

    def with_weight(self, weight: Tensor) -> LinearMethod:
        return PackedLinear(Linear.over(weight, self.bias), packs_later=not self.is_packed)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.max_plain_rows or not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        if self._gemm is not None and self.matrix is not None:
            return self._gemm.multiply(x, self.matrix)
        if self.padding:
            x = F.pad(x, (0, self.padding))
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""),
        )

    def matrix_for(self, num_rows: int) -> PackedMatrix | None:
        """Return the panels for a compiled GEMM of num_rows rows; None if `forward` is faster."""
        return None if num_rows <= self.max_plain_rows else self.matrix


def pack_linears(decoder: Decoder, *, byte_limit: int, packs_later: bool = False) -> int:
    """Pack linears in order while they fit into `byte_limit`; return the bytes taken.

    Those that need padding are packed in any case. `packs_later`: see PackedLinear.
    """
    if not can_pack(decoder.dtype, decoder.norm.weight.device):
        return 0
    names = [spec.name for spec in linears_of(decoder.config)]
    sites = [(layer, name) for layer in decoder.layers for name in names]
    num_bytes = 0
    for owner, site in [*sites, (decoder, "lm_head")]:
        linear = getattr(owner, site)
        if type(linear) is not Linear:
            continue
        # Without a packed copy a weight that needs padding would be padded in every step.
        fits = num_bytes + linear.weight.nbytes <= byte_limit
        if not fits and not tile_padding(linear.weight):
            continue
        setattr(owner, site, PackedLinear(linear, packs_later=packs_later))
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
