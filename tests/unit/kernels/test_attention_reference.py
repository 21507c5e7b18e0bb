from __future__ import annotations

import torch

from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout


def test_chunks_over_pages_equal_dense_causal_attention() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
    q, k, v = torch.randn(5, 2, 4), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    storage = torch.zeros(4, 2 * 2 * 4)
    args = AttendArgs(layer=0, scale=0.5)
    outs = []
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        sequence = SequenceRows(0, stop - start, start, [3, 0, 2])
        plan = attention_torch.plan([sequence], layout, torch.device("cpu"))
        plan.write_kv(storage, 0, k[start:stop], v[start:stop])
        outs.append(plan.attend(storage, q[start:stop], args))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).expand(2, 5, 4),
        v.transpose(0, 1).expand(2, 5, 4),
        is_causal=True,
        scale=0.5,
    )
    torch.testing.assert_close(torch.cat(outs).view(5, 2, 4), dense.transpose(0, 1))
