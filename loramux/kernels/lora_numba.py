"""Fast on a CPU, in float32: short runs of rows read their adapter once; long ones are products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels import lora_cpu
from loramux.kernels.interface import LoraRows, LoraWeights, Segment
from loramux.kernels.math_numba import OPTIONS

# From here on a product of matrices is faster, even if it is computed on one thread.
_MAX_ROWS = 32
# Of a longer segment, so that there is work for every thread.
_RUN_ROWS = 8
_A_ROWS = 32
_B_ROWS = 8


def cut_rows(segments: Sequence[Segment], num_slots: int) -> LoraRows:
    rounds: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.start):
        if segment.stop - segment.start <= _MAX_ROWS:
            _put(rounds, segment)
    return LoraRows(
        segments=tuple(segments),
        single=tuple(s for s in segments if s.stop - s.start > _MAX_ROWS),
        rounds=tuple(_runs(members) for members in rounds),
    )


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, rows: LoraRows) -> None:
    """y[i] += weight(i) * x[i] @ a[slot(i)] @ b[slot(i)]; rows without an adapter are untouched."""
    for runs, run_weights in rows.rounds:
        storage, site = _prepared(weights)
        _add_runs(y.numpy(), x.contiguous().numpy(), storage, site, runs, run_weights)
    if rows.single:
        lora_cpu.add_lora(y, x, weights, rows)


def _put(rounds: list[list[Segment]], segment: Segment) -> None:
    """Into the first round that has none of its rows; those before it begin no later."""
    for members in rounds:
        if members[-1].stop <= segment.start:
            members.append(segment)
            return
    rounds.append([segment])


def _runs(segments: Sequence[Segment]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    runs = [
        ((s.slot, start, min(start + _RUN_ROWS, s.stop)), s.weight)
        for s in segments
        for start in range(s.start, s.stop, _RUN_ROWS)
    ]
    return np.array([r for r, _ in runs], np.int64), np.array([w for _, w in runs], np.float32)


def _prepared(weights: LoraWeights) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All memory of the stack, and where the site is in it; made once.

    The table's first line is (start of a, between two adapters, total rank, 0, 0), and each other
    line a slice: (start of b, rank, out, rank_start, out_start).
    """
    if not weights.prepared:
        a = weights.a
        for piece in weights.slices:
            assert piece.b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
            assert piece.b.stride(0) == a.stride(0), "an adapter is one run of its stack"
        size = a.untyped_storage().nbytes() // a.element_size()
        lines = [(a.storage_offset(), a.stride(0), a.shape[2], 0, 0)]
        for piece in weights.slices:
            rank, out_features = piece.b.shape[1:]
            start = piece.b.storage_offset()
            lines.append((start, rank, out_features, piece.rank_start, piece.out_start))
        table = np.array(lines, dtype=np.int64)
        weights.prepared.append((a.as_strided((size,), (1,), 0).numpy(), table))
    found: tuple[NDArray[np.float32], NDArray[np.int64]] = weights.prepared[0]
    return found


@njit("void(float32[::1], float32[::1], float32[::1])", **OPTIONS)
def _add_sums(into, factors, matrix):
    """into += factors @ matrix, eight rows of it at a time."""
    width, eights = into.size, factors.size // 8 * 8
    for k in range(0, eights, 8):
        f, m = factors[k : k + 8], matrix[k * width : (k + 8) * width]
        f0, f1, f2, f3, f4, f5, f6, f7 = f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
        for j in range(width):
            into[j] += (
                f0 * m[j]
                + f1 * m[width + j]
                + f2 * m[2 * width + j]
                + f3 * m[3 * width + j]
                + f4 * m[4 * width + j]
                + f5 * m[5 * width + j]
                + f6 * m[6 * width + j]
                + f7 * m[7 * width + j]
            )
    for k in range(eights, factors.size):
        factor, row = factors[k], matrix[k * width : (k + 1) * width]
        for j in range(width):
            into[j] += factor * row[j]


@njit(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], int64[:, ::1], int64[:, ::1],"
    "float32[::1])",
    parallel=True,
    **OPTIONS,
)
def _add_runs(y, x, storage, site, runs, weights):
    size, distance, width = x.shape[1], site[0, 1], site[0, 2]
    for number in prange(len(runs)):
        slot, start, stop = runs[number]
        h = np.zeros((stop - start, width), dtype=np.float32)
        # By parts that stay in the nearest cache while all rows of the run use them.
        for k in range(0, size, _A_ROWS):
            end = min(size, k + _A_ROWS)
            a = storage[site[0, 0] + slot * distance + k * width :][: (end - k) * width]
            for i in range(start, stop):
                _add_sums(h[i - start], x[i, k:end], a)
        h *= weights[number]
        for piece in range(1, len(site)):
            first, rank, out, rank_start, out_start = site[piece]
            for r in range(0, rank, _B_ROWS):
                end = min(rank, r + _B_ROWS)
                b = storage[first + slot * distance + r * out :][: (end - r) * out]
                for i in range(start, stop):
                    factors = h[i - start, rank_start + r : rank_start + end]
                    _add_sums(y[i, out_start : out_start + out], factors, b)
