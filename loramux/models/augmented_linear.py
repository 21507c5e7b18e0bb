"""Linear layers with room behind their weight, for rows that are computed by the same product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from loramux.memory.device import release_cached
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear

BLOCK_ROWS = 16
SLICES = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}


class AugmentedLinear(Linear):
    """As Linear: `weight` is a view of `extended`, and so are the rows behind it."""

    def __init__(self, linear: Linear, num_rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, bias = linear.weight.data, linear.bias
        self.extended = weight.new_zeros(self.out_features + num_rows, self.in_features)
        self.extended[: self.out_features].copy_(weight)
        self.weight = nn.Parameter(self.extended[: self.out_features], requires_grad=False)
        self.bias = bias
        self.extended_bias = None if bias is None else F.pad(bias.data, (0, num_rows))

    @property
    def appended(self) -> Tensor:
        """[rows, in]"""
        return self.extended[self.out_features :]

    def with_appended(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Weight [out + num_rows, in] and bias, with the first num_rows of the tail."""
        stop = self.out_features + num_rows
        bias = None if self.extended_bias is None else self.extended_bias[:stop]
        return self.extended[:stop], bias


def augment_linears(decoder: Decoder, num_blocks: int) -> None:
    """Every linear layer gets so many blocks of 16 rows for each of its slices."""
    for layer in decoder.layers:
        for name, num_slices in SLICES.items():
            linear = getattr(layer, name)
            assert isinstance(linear, Linear), "a linear layer was packed or wrapped"
            num_rows = num_blocks * num_slices * BLOCK_ROWS
            if not isinstance(linear, AugmentedLinear) or len(linear.appended) != num_rows:
                setattr(layer, name, AugmentedLinear(linear, num_rows))
        # Or all weights would be there twice before the first is given back.
        release_cached(decoder.norm.weight.device)


def appended_rows(decoder: Decoder) -> list[list[Tensor]] | None:
    """[layers][sites] of [blocks, slices, 16, in]; None: the layers have no tails."""
    found = [
        [
            linear.appended.view(-1, num_slices, BLOCK_ROWS, linear.in_features)
            for name, num_slices in SLICES.items()
            if isinstance(linear := getattr(layer, name), AugmentedLinear)
        ]
        for layer in decoder.layers
    ]
    return found if all(len(of_layer) == len(SLICES) for of_layer in found) else None
