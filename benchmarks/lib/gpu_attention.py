"""Time paged attention alone: prefill against torch's kernels, decode against memory bandwidth.

The shapes are those of Llama-3.1-8B in bfloat16. It needs an NVIDIA GPU.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lib.report import Table
from benchmarks.lib.timing import replay_times
from loramux.kernels.gpu.attention import ops as attention
from loramux.kernels.ops import AttendArgs, SequenceRows
from loramux.types.kv import KVLayout

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
READ_BYTES_PER_S = 4.06e12
"""The rate of one large GEMV on an H200."""
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16

PREFILLS = [(1, 8192), (4, 2048), (16, 512)]
"""(number of sequences, tokens of each)"""
DECODES = [
    (1, (512, 512)),
    (1, (16384, 16384)),
    (2, (8192, 8192)),
    (8, (4096, 4096)),
    (32, (512, 512)),
    (64, (512, 512)),
    (96, (512, 512)),
    (128, (512, 512)),
    (256, (512, 512)),
    (64, (16, 2048)),
    (256, (16, 864)),
]
"""(number of sequences, (fewest, most tokens of each)), drawn at random"""


def make_storage(num_pages: int, num_layers: int) -> tuple[torch.Tensor, KVLayout]:
    layout = KVLayout(num_layers, KV_HEADS, HEAD_DIM, BLOCK)
    page = num_layers * 2 * BLOCK * KV_HEADS * HEAD_DIM
    return torch.empty(num_pages, page, dtype=DTYPE, device=DEVICE).normal_(), layout


def time_prefill(num_sequences: int, num_tokens: int) -> float:
    pages_each = -(-num_tokens // BLOCK)
    storage, layout = make_storage(num_sequences * pages_each, 2)
    order = torch.randperm(num_sequences * pages_each).view(num_sequences, -1).tolist()
    sequences = [SequenceRows(i * num_tokens, num_tokens, 0, p) for i, p in enumerate(order)]
    plan = attention.plan(sequences, layout, DEVICE)
    q = torch.randn(num_sequences * num_tokens, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    args = AttendArgs(layer=1, scale=HEAD_DIM**-0.5)
    plan.attend(storage, q, args)
    return replay_times(lambda: plan.attend(storage, q, args), num_replays=6)[1]


def time_sdpa(num_sequences: int, num_tokens: int, backend: SDPBackend) -> float:
    q, k, v = torch.randn(3, num_sequences, HEADS, num_tokens, HEAD_DIM, device=DEVICE).to(DTYPE)

    def work() -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(q, k, v, is_causal=True)

    return replay_times(work, num_replays=6)[1]


def time_decode(lengths: torch.Tensor) -> float:
    """Return the seconds per layer; a graph runs 32 layers, so that L2 holds nothing of use."""
    num_sequences, width = lengths.shape[0], int(lengths.max()) // BLOCK + 1
    num_layers, num_pages = 32, num_sequences * width
    storage, layout = make_storage(num_pages, num_layers)
    pages = torch.randperm(num_pages, device=DEVICE).int().view(num_sequences, width)
    heads = HEADS + 2 * KV_HEADS
    qkv = torch.randn(num_sequences, heads, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    q = qkv[:, :HEADS]
    plan = attention.plan_decodes(pages, layout, q)
    plan.partition(lengths)

    def work() -> None:
        for layer in range(num_layers):
            plan.attend(storage, q, AttendArgs(layer=layer, scale=0.09))

    return replay_times(work, num_replays=4)[1] / num_layers


def prefill_rows() -> Table:
    rows: Table = []
    for count, tokens in PREFILLS:
        flops = count * HEADS * HEAD_DIM * 2 * tokens * (tokens + 1)
        ours = time_prefill(count, tokens)
        flash = time_sdpa(count, tokens, SDPBackend.FLASH_ATTENTION)
        cudnn = time_sdpa(count, tokens, SDPBackend.CUDNN_ATTENTION)
        us = {"us": ours * 1e6, "flash us": flash * 1e6, "cudnn us": cudnn * 1e6}
        row = {"prompt": f"{count} x {tokens}", **us, "TFLOP/s": flops / ours / 1e12}
        rows.append({**row, "of flash's speed": flash / ours})
    return rows


def decode_rows() -> Table:
    rows: Table = []
    for count, (low, high) in DECODES:
        lengths = torch.randint(low, high + 1, (count,), device=DEVICE).int()
        seconds = time_decode(lengths)
        speed = int(lengths.sum()) * 2 * KV_HEADS * HEAD_DIM * 2 / seconds
        rows.append(
            {
                "decode": f"{count} x {low if low == high else f'{low}..{high}'}",
                "us per layer": seconds * 1e6,
                "TB/s": speed / 1e12,
                f"of {READ_BYTES_PER_S / 1e12} TB/s": speed / READ_BYTES_PER_S,
            }
        )
    return rows
