"""Tokens from logits without the host: two kernels, over parts of the vocabulary and over rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.launch_triton import begin_after_previous, overlap_options

PART = 4096


def choose_tokens(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """One token per row: the best at temperature 0, else by inverse CDF in vocabulary order.

    logits [rows, vocab]   temperatures [rows] float32   noise [rows] float64 in [0, 1)
    returns [rows] int64. A row whose best logit is not finite takes it, whatever its temperature;
    of equal ones the first; not a number counts as the highest.
    """
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    place = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = overlap_options(logits.device.type)
    _sum_parts[(num_rows, num_parts)](
        logits,
        temperatures,
        best,
        place,
        sums,
        logits.stride(0),
        vocab,
        num_parts,
        PART=PART,
        num_warps=8,
        **options,
    )
    _choose[(num_rows,)](
        logits,
        temperatures,
        noise,
        best,
        place,
        sums,
        tokens,
        logits.stride(0),
        vocab,
        num_parts,
        PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=8,
        **options,
    )
    return tokens


@triton.jit
def _load_part(logits_ptr, start, vocab, PART: tl.constexpr):
    column = start + tl.arange(0, PART)
    logits = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
    logits = logits.to(tl.float32)
    return column, tl.where(logits != logits, float("inf"), logits)


@triton.jit
def _weights(logits, best, temperature):
    """exp((logits - best) / temperature), and 0 for all where even the best is no number."""
    is_number = (best > float("-inf")) & (best < float("inf"))
    scaled = (logits - tl.where(is_number, best, 0.0)) / tl.maximum(temperature, 1e-30)
    return tl.where(is_number, tl.exp(scaled), 0.0).to(tl.float64)


@triton.jit
def _sum_parts(  # noqa: PLR0913
    logits_ptr,
    temperatures_ptr,
    best_ptr,
    place_ptr,
    sums_ptr,
    stride,
    vocab,
    num_parts,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column, logits = _load_part(logits_ptr + row * stride, part * PART, vocab, PART)
    best = tl.max(logits, 0)
    place = tl.min(tl.where(logits == best, column, vocab - 1), 0)
    target = row * num_parts + part
    tl.store(best_ptr + target, best)
    tl.store(place_ptr + target, place)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        tl.store(sums_ptr + target, tl.sum(_weights(logits, best, temperature), 0))


@triton.jit
def _choose(  # noqa: PLR0913
    logits_ptr,
    temperatures_ptr,
    noise_ptr,
    best_ptr,
    place_ptr,
    sums_ptr,
    tokens_ptr,
    stride,
    vocab,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    bests = tl.load(best_ptr + row * num_parts + part, mask=is_part, other=float("-inf"))
    places = tl.load(place_ptr + row * num_parts + part, mask=is_part, other=vocab)
    best = tl.max(bests, 0)
    token = tl.min(tl.where((bests == best) & is_part, places, vocab - 1), 0)
    temperature = tl.load(temperatures_ptr + row)
    if (temperature > 0) & (best < float("inf")) & (best > float("-inf")):
        sums = tl.load(sums_ptr + row * num_parts + part, mask=is_part, other=0.0)
        # A part's sum is relative to its own best; all are brought to the row's best.
        factors = tl.where(is_part, _weights(bests, best, temperature), 0.0)
        sums = tl.where(factors > 0, sums * factors, 0.0)
        ends = tl.cumsum(sums, 0)
        wanted = tl.load(noise_ptr + row) * tl.sum(tl.where(part == num_parts - 1, ends, 0.0), 0)
        last = tl.max(tl.where(sums > 0, part, 0), 0)
        chosen = tl.minimum(tl.min(tl.where(ends > wanted, part, num_parts), 0), last)
        before = tl.sum(tl.where(part == chosen, ends - sums, 0.0), 0)
        factor = tl.sum(tl.where(part == chosen, factors, 0.0), 0)
        own_best = tl.max(tl.where(part == chosen, bests, float("-inf")), 0)
        column, logits = _load_part(logits_ptr + row * stride, chosen * PART, vocab, PART)
        weights = _weights(logits, own_best, temperature)
        reached = before + tl.cumsum(weights, 0) * factor > wanted
        last_column = tl.max(tl.where(weights > 0, column, 0), 0)
        token = tl.min(tl.where(reached & (weights > 0), column, last_column), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
