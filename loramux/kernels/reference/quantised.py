"""GEMMs over quantised weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from loramux.kernels.quantised_ops import CodedRows, EightBitWeight, FourBitWeight

MAX_ROWS = 128
MAX_FOUR_BIT_ROWS = 64
VECTOR_ROWS = 2
FP8_MAX = 448.0
LEAST_MAXIMUM = 1e-30
REMAINDER_SCALE = 1 / 16


def quantise_rows(x: Tensor, *, terms: int, group: int = 0) -> CodedRows:
    values = x.float()
    sound = values.where(values.isfinite(), 0)
    largest = sound.abs().amax(dim=1).clamp(min=LEAST_MAXIMUM)
    scales = largest / FP8_MAX + (values * 0).sum(dim=1)
    values = values * (FP8_MAX / largest)[:, None]
    codes = [values.to(torch.float8_e4m3fn)]
    if terms == 2:
        rest = (values - codes[0].float()) / REMAINDER_SCALE
        codes.append(rest.to(torch.float8_e4m3fn))
    coded = CodedRows(torch.stack(codes), scales, None)
    if not group:
        return coded
    sums = _values(coded.codes).view(len(x), -1, group).sum(dim=2)
    return coded._replace(sums=sums.t().contiguous())


def multiply_eight_bit(x: CodedRows, weight: EightBitWeight, y: Tensor) -> None:
    _multiply(_values(x.codes) * x.scales[:, None], weight.dequantised(), y)


def multiply_four_bit(x: CodedRows, weight: FourBitWeight, y: Tensor) -> None:
    _multiply(_values(x.codes) * x.scales[:, None], weight.dequantised(), y)


def multiply_vectors(x: Tensor, weight: EightBitWeight, y: Tensor, *, rounds: bool) -> None:
    values = x.float()
    if rounds:
        coded = quantise_rows(x, terms=1)
        values = _values(coded.codes) * coded.scales[:, None]
    _multiply(values, weight.dequantised(), y)


def multiply_many(x: Tensor, weight: EightBitWeight) -> Tensor:
    y = x.new_empty(len(x), len(weight.codes))
    multiply_vectors(x, weight, y, rounds=True)
    return y


def dequantise(weight: EightBitWeight | FourBitWeight, out: Tensor) -> None:
    out.copy_(weight.dequantised())


def _values(codes: Tensor) -> Tensor:
    values = codes[0].float()
    return values if len(codes) == 1 else values + codes[1].float() * REMAINDER_SCALE


def _multiply(x: Tensor, weight: Tensor, y: Tensor) -> None:
    if y.ndim == 2:
        y.copy_(x @ weight.t())
        return
    depth = x.shape[1] // len(y)
    for split, sums in enumerate(y):
        part = slice(split * depth, (split + 1) * depth)
        sums.copy_(x[:, part] @ weight[:, part].t())
