from __future__ import annotations

import torch

from loramux.kernels.ops import LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora as lora_torch


def test_each_slice_adds_to_its_own_columns_with_its_own_rank() -> None:
    a = torch.randn(2, 4, 3)
    q, v = torch.randn(2, 2, 5), torch.randn(2, 1, 3)
    weights = LoraWeights(a=a, slices=(LoraSlice(q, 0, 0), LoraSlice(v, 2, 7)))
    x, y = torch.randn(6, 4), torch.zeros(6, 10)
    lora_torch.add_lora(y, x, weights, lora_torch.cut_rows([Segment(1, 2, 5, 0.5)], 2))
    torch.testing.assert_close(y[2:5, :5], 0.5 * x[2:5] @ a[1, :, :2] @ q[1])
    torch.testing.assert_close(y[2:5, 7:], 0.5 * x[2:5] @ a[1, :, 2:] @ v[1])
    assert not y[:, 5:7].any()
    assert not y[[0, 1, 5]].any()
