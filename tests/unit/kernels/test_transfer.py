from __future__ import annotations

import torch

from loramux.kernels.gpu.transfer import send


def test_what_arrives_is_what_was_sent() -> None:
    values = torch.arange(6, dtype=torch.int32).view(2, 3)
    arrived = send(values, torch.device("cpu"))
    assert arrived.dtype == torch.int32 and torch.equal(arrived, values)
