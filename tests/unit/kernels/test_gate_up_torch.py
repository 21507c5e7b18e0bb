from __future__ import annotations

import torch
import torch.nn.functional as F

from loramux.kernels.reference import swiglu as gate_up_torch


def test_gate_is_first_and_activated() -> None:
    x, gate, up = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 8)
    found = gate_up_torch.gate_up(x, torch.cat((gate, up)), "silu")
    torch.testing.assert_close(found, F.silu(x @ gate.t()) * (x @ up.t()))


def test_what_is_between_is_not_rounded() -> None:
    x, weight = torch.randn(4, 64).half(), torch.randn(16, 64).half()
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    expected = (F.silu(gate) * up).half()
    found = gate_up_torch.gate_up(x, weight, "silu")
    # Of what float32 adds up in another order, few numbers are rounded to another neighbour.
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=1e-5)
    assert found.dtype == torch.float16


def test_one_after_the_other_on_this_device() -> None:
    assert not gate_up_torch.fits(torch.ones(64, 8).half(), torch.ones(4, 8).half())
