"""Linear layers with rows appended to the weight, for LoRA A computed by the same GEMM."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from loramux.kernels.linear import DenseWeight
from loramux.memory.device import release_cached
from loramux.models.architectures import linears_of
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear

RANK_BLOCK = 16


class AugmentedLinear(Linear):
    """A dense linear whose `weight` is a view of `extended`, which has further rows behind it."""

    def __init__(self, linear: Linear, num_rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, bias = linear.weight, linear.bias
        self.extended = weight.new_zeros(self.out_features + num_rows, self.in_features)
        self.extended[: self.out_features].copy_(weight)
        self.weight = nn.Parameter(self.extended[: self.out_features], requires_grad=False)
        self.bias, self._extended_bias = None, None
        if bias is not None:
            # A view as well: weights and biases may be read after the rows were appended.
            self._extended_bias = F.pad(bias.data, (0, num_rows))
            self.bias = nn.Parameter(self._extended_bias[: self.out_features], requires_grad=False)

    @property
    def appended(self) -> Tensor:
        """The rows behind the weight: [rows, in]"""
        return self.extended[self.out_features :]

    @property
    def num_bytes(self) -> int:
        return self.extended.nbytes

    def augmented(self, num_rows: int) -> DenseWeight:
        """Weight [out + num_rows, in] and bias, with the first num_rows appended rows."""
        stop = self.out_features + num_rows
        bias = None if self._extended_bias is None else self._extended_bias[:stop]
        return DenseWeight(self.extended[:stop], bias)


def augment_linears(decoder: Decoder, num_blocks: int) -> None:
    """Append num_blocks rank blocks of 16 rows per projection to every linear of the layers.

    A decoder with a linear that is not dense keeps its linears: steps are augmented as a whole.
    """
    specs = linears_of(decoder.config)
    if not all(isinstance(linear, Linear) for _, linear in decoder.linears()):
        return
    for layer in decoder.layers:
        for spec in specs:
            linear = getattr(layer, spec.name)
            num_rows = num_blocks * len(spec.projections) * RANK_BLOCK
            if not isinstance(linear, AugmentedLinear) or len(linear.appended) != num_rows:
                setattr(layer, spec.name, AugmentedLinear(linear, num_rows))
        # Frees the old weights of a layer before the next one is copied.
        release_cached(decoder.norm.weight.device)


def appended_rows(decoder: Decoder) -> list[list[Tensor]] | None:
    """Return the appended rows as [layers][linears] of [blocks, projections, 16, in].

    None if the linears are not augmented.
    """
    specs = linears_of(decoder.config)
    found = [
        [
            linear.appended.view(-1, len(spec.projections), RANK_BLOCK, linear.in_features)
            for spec in specs
            if isinstance(linear := getattr(layer, spec.name), AugmentedLinear)
        ]
        for layer in decoder.layers
    ]
    return found if all(len(of_layer) == len(specs) for of_layer in found) else None
