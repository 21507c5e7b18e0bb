"""Samples tokens on the device: one kernel over parts of the vocabulary, one over rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.kernels.gpu.pdl import pdl_options, pdl_wait_and_launch
from loramux.kernels.sampling_ops import MaskedRows

PART = 4096
# Columns that a thread reads at once; their maximum is found before its column.
GROUP = tl.constexpr(8)
LOG2_E = tl.constexpr(1.4426950408889634)
# Mark of a row without a valid token: the upper of two int32 words, the token is the lower one.
NO_TOKEN = tl.constexpr(1 << 32)


def choose_tokens(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """One token per row: the argmax at temperature 0, else by inverse CDF in vocabulary order.

    logits [rows, vocab]   temperatures [rows] float32   noise [rows] float64 in [0, 1)
    returns [rows] int64. A row whose best logit is not finite takes it, whatever its temperature,
    plus NO_TOKEN; ties go to the first; NaN counts as the highest.
    """
    return _launch(logits, temperatures, noise, None)


def choose_masked_tokens(
    logits: Tensor, temperatures: Tensor, noise: Tensor, masked: MaskedRows
) -> Tensor:
    """`choose_tokens` of some rows, as if the logits of other tokens were -inf: [masked] int64"""
    return _launch(logits, temperatures, noise, masked)


def _launch(
    logits: Tensor, temperatures: Tensor, noise: Tensor, masked: MaskedRows | None
) -> Tensor:
    vocab = logits.shape[1]
    # Without masks the kernels get pointers that they do not read.
    rows, masks = (noise, noise) if masked is None else (masked.rows, masked.masks)
    num_rows = logits.shape[0] if masked is None else rows.shape[0]
    num_words = 0 if masked is None else masks.shape[1]
    num_parts = triton.cdiv(vocab, PART)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    place = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = pdl_options(logits.device.type)
    _sum_parts[(num_rows, num_parts)](
        logits,
        temperatures,
        rows,
        masks,
        best,
        place,
        sums,
        logits.stride(0),
        vocab,
        num_words,
        num_parts,
        PART=PART,
        MASKED=masked is not None,
        num_warps=4,
        **options,
    )
    _choose[(num_rows,)](
        logits,
        temperatures,
        noise,
        rows,
        masks,
        best,
        place,
        sums,
        tokens,
        logits.stride(0),
        vocab,
        num_words,
        num_parts,
        PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
        MASKED=masked is not None,
        num_warps=8,
        **options,
    )
    return tokens


@triton.jit
def _load_part(  # noqa: PLR0913
    logits_ptr, mask_ptr, start, vocab, num_words, PART: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Columns from `start` on, and their logits: -inf where the row's mask has no bit."""
    column = start + tl.arange(0, PART)
    logits = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
    logits = logits.to(tl.float32)
    if MASKED:
        word = column >> 5
        bits = tl.load(mask_ptr + word, mask=word < num_words, other=0)
        logits = tl.where((bits >> (column & 31)) & 1 != 0, logits, float("-inf"))
    return column, logits


@triton.jit
def _row_of(rows_ptr, number, MASKED: tl.constexpr):
    """Return the row of the logits that a program samples."""
    return tl.load(rows_ptr + number).to(tl.int64) if MASKED else number


@triton.jit
def _nan_as_highest(logits):
    """Replace NaN by infinity, so that a row with NaN gets a token."""
    return tl.where(logits != logits, float("inf"), logits)


@triton.jit
def _best_of_groups(logits, PART: tl.constexpr):
    """Return the highest of every GROUP logits: [PART / GROUP]; NaN where a logit is NaN."""
    WIDTH: tl.constexpr = PART // GROUP
    tl.static_assert(GROUP == 8, "halved three times")
    left, right = tl.split(tl.reshape(logits, (WIDTH, 4, 2)))
    best = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    left, right = tl.split(tl.reshape(best, (WIDTH, 2, 2)))
    best = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    left, right = tl.split(best)
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weights(logits, best, temperature):
    """exp((logits - best) / temperature), where the best is finite."""
    return tl.exp2((logits - best) * (LOG2_E / tl.maximum(temperature, 1e-30)))


@triton.jit
def _sum_parts(  # noqa: PLR0913
    logits_ptr,
    temperatures_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    place_ptr,
    sums_ptr,
    stride,
    vocab,
    num_words,
    num_parts,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the best logit of one part of a row, its group's start, and the sum of weights."""
    number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    target = number * num_parts + part
    pdl_wait_and_launch(PDL)
    row = _row_of(rows_ptr, number, MASKED)
    row_ptr, mask_ptr = logits_ptr + row * stride, masks_ptr + number * num_words
    _, logits = _load_part(row_ptr, mask_ptr, part * PART, vocab, num_words, PART, MASKED)
    temperature = tl.load(temperatures_ptr + row)
    bests = _nan_as_highest(_best_of_groups(logits, PART))
    best = tl.max(bests, 0)
    group = tl.arange(0, PART // GROUP)
    place = part * PART + tl.min(tl.where(bests == best, group, PART), 0) * GROUP
    tl.store(best_ptr + target, best)
    tl.store(place_ptr + target, place)
    if temperature > 0:
        is_number = (best > float("-inf")) & (best < float("inf"))
        weights = _weights(logits, tl.where(is_number, best, 0.0), temperature)
        # A few are added in float32: a float64 sum of each would take longer than reading them.
        few = tl.sum(tl.reshape(weights, (PART // GROUP, GROUP)), 1)
        total = tl.sum(few.to(tl.float64), 0)
        tl.store(sums_ptr + target, tl.where(is_number, total, 0.0))


@triton.jit
def _choose(  # noqa: PLR0913
    logits_ptr,
    temperatures_ptr,
    noise_ptr,
    rows_ptr,
    masks_ptr,
    best_ptr,
    place_ptr,
    sums_ptr,
    tokens_ptr,
    stride,
    vocab,
    num_words,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    at = number * num_parts + part
    pdl_wait_and_launch(PDL)
    row = _row_of(rows_ptr, number, MASKED)
    row_ptr, mask_ptr = logits_ptr + row * stride, masks_ptr + number * num_words
    bests = tl.load(best_ptr + at, mask=is_part, other=float("-inf"))
    best = tl.max(bests, 0)
    temperature = tl.load(temperatures_ptr + row)
    is_valid = (best < float("inf")) & (best > float("-inf"))
    if (temperature > 0) & is_valid:
        sums = tl.load(sums_ptr + at, mask=is_part, other=0.0)
        noise = tl.load(noise_ptr + row)
        token = _draw(
            row_ptr, mask_ptr, bests, best, sums, noise, temperature, vocab, num_words, num_parts,
            PART, PARTS, MASKED,
        )  # fmt: skip
    else:
        places = tl.load(place_ptr + at, mask=is_part, other=vocab)
        start = tl.min(tl.where((bests == best) & is_part, places, vocab - 1), 0)
        column, logits = _load_part(row_ptr, mask_ptr, start, vocab, num_words, GROUP, MASKED)
        token = tl.min(tl.where(_nan_as_highest(logits) == best, column, vocab - 1), 0)
    tl.store(tokens_ptr + number, token.to(tl.int64) + tl.where(is_valid, 0, NO_TOKEN))


@triton.jit
def _draw(  # noqa: PLR0913
    row_ptr, mask_ptr, bests, best, sums, noise, temperature, vocab, num_words, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the token where the weights of a row reach noise of their sum. bests, sums [PARTS]"""
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    # A part's sum is relative to its own best; all are brought to the row's best.
    factors = tl.where(is_part, _weights(bests, best, temperature), 0.0).to(tl.float64)
    sums = tl.where(factors > 0, sums * factors, 0.0)
    ends = tl.cumsum(sums, 0)
    wanted = noise * tl.sum(tl.where(part == num_parts - 1, ends, 0.0), 0)
    last = tl.max(tl.where(sums > 0, part, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(ends > wanted, part, num_parts), 0), last)
    before = tl.sum(tl.where(part == chosen, ends - sums, 0.0), 0)
    factor = tl.sum(tl.where(part == chosen, factors, 0.0), 0)
    own_best = tl.max(tl.where(part == chosen, bests, float("-inf")), 0)
    column, logits = _load_part(row_ptr, mask_ptr, chosen * PART, vocab, num_words, PART, MASKED)
    weights = _weights(logits, own_best, temperature).to(tl.float64)
    reached = before + tl.cumsum(weights, 0) * factor > wanted
    last_column = tl.max(tl.where(weights > 0, column, 0), 0)
    return tl.min(tl.where(reached & (weights > 0), column, last_column), 0)
