"""The modules of a decoder layer; the loader fills their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.errors import UnsupportedModel
from loramux.kernels.linear import ALL_ROWS, DENSE, LinearMethod, Slot, linear
from loramux.models.rope import RopeConfig
from loramux.models.slots import whole
from loramux.types.model import Projection


class Linear(nn.Module):
    """A linear layer with a dense weight; the base of packed and augmented ones."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    @classmethod
    def over(cls, weight: Tensor, bias: nn.Parameter | None) -> Linear:
        """Make a linear over an existing weight [out, in]."""
        linear = cls(weight.shape[1], weight.shape[0], dtype=weight.dtype, device="meta")
        # The head of a model may be its embedding.
        linear.weight = (
            weight
            if isinstance(weight, nn.Parameter)
            else nn.Parameter(weight, requires_grad=False)
        )
        linear.bias = bias
        return linear

    gemm_key = DENSE

    def slots(self, projection: Projection) -> Mapping[str, Slot]:
        rows, row_map = projection.rows, projection.row_map
        found = {"weight": whole(self.weight[rows], row_map)}
        if self.bias is not None:
            found["bias"] = whole(self.bias[rows], row_map)
        return found

    def dequantised_rows(self, rows: slice = ALL_ROWS) -> Tensor:
        return self.weight[rows]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def merged_bytes(self) -> int:
        return self.weight.nbytes

    def with_weight(self, weight: Tensor) -> LinearMethod:
        return Linear.over(weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, computed in float32 if the weight is float32."""

    eps_tensor: Tensor

    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.register_buffer("eps_tensor", torch.tensor(eps, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.is_cpu and x.dtype == torch.float32:
            # torch has no fused kernel here, and its fallback takes twice as many operations.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            mean_square = torch.addcmul(self.eps_tensor, length, length, value=1 / self.shape[0])
            return (x * mean_square.rsqrt_()).mul_(weight)
        return F.rms_norm(x.to(weight.dtype), self.shape, weight, self.eps).to(x.dtype)


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head, with one weight row per head.

    x [tokens, heads + kv_heads, head_dim]   weight [heads + kv_heads, head_dim]
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape = (head_dim,)
        self.eps = eps
        self.weight = empty_parameter(num_heads, head_dim, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        normed = F.rms_norm(x.to(weight.dtype), self.shape, None, self.eps)
        return normed.mul_(weight).to(x.dtype)


class WideNorm(nn.Module):
    """The RMSNorms of all query heads of a token together, and of all its key heads."""

    def __init__(
        self,
        sizes: tuple[int, int],
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """sizes: of the queries and of the keys of a token"""
        super().__init__()
        self.query = RMSNorm(sizes[0], eps=eps, dtype=dtype, device=device)
        self.key = RMSNorm(sizes[1], eps=eps, dtype=dtype, device=device)


class Rotary(nn.Module):
    """Rotary position embedding: cos and sin of a step's positions."""

    frequencies: Tensor
    signs: Tensor
    """The factor of sin; its absolute value is that of cos."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        turning, factor = inverse_frequencies(rope, head_dim)
        # Dimensions beyond the rotated ones turn by no angle.
        num_fixed = head_dim // 2 - len(turning)
        half = F.pad(turning, (0, num_fixed))
        factors = F.pad(torch.full_like(turning, factor), (0, num_fixed), value=1.0)
        signs = torch.cat((-factors, factors))
        self.has_factor = factor != 1.0
        self.register_buffer("frequencies", half.repeat(2).to(device), persistent=False)
        self.register_buffer("signs", signs.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, and sin negated in its first half: [tokens, 1, head_dim] each."""
        angles = positions.view(-1, 1, 1) * self.frequencies
        cos = angles.cos()
        if self.has_factor:
            cos.mul_(self.signs.abs())
        return cos.to(dtype), angles.sin_().mul_(self.signs).to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute heads * cos + halves_swapped(heads) * sin in place.

    heads [tokens, heads, head_dim]   cos, sin [tokens, 1, head_dim] from Rotary
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the radians per position of each rotated pair, and the factor of cos and sin."""
    size = rope.num_rotated(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "longrope":
        return longrope_frequencies(rope, exponents), yarn_attention_factor(rope)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return llama3_frequencies(plain, rope), 1.0
    if rope.rope_type == "yarn":
        return yarn_frequencies(plain, rope, size), yarn_attention_factor(rope)
    return plain, 1.0


def llama3_frequencies(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, interpolate between them."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def yarn_frequencies(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate linearly over the dimensions from unscaled to divided by `factor`."""

    def dimension_that_turns(times: float) -> float:
        ratio = rope.original_max_position / (times * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return stretch * plain / rope.factor + (1 - stretch) * plain


def longrope_frequencies(rope: RopeConfig, exponents: Tensor) -> Tensor:
    if len(rope.factors) != len(exponents):
        raise UnsupportedModel(
            f"config.json has {len(rope.factors)} factors of longrope for {len(exponents)} rotated "
            "pairs of dimensions."
        )
    return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)


def yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def empty_parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
