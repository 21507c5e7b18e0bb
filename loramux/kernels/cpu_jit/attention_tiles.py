"""Register tiles of attention (float32): query heads that share a KV head read it together."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from loramux.kernels.cpu_jit.runtime import OPTIONS
from loramux.kernels.cpu_jit.tiles import FLOAT_BYTES, LINE_BYTES, LONG, SHAPE, Emitter, tile_of

TOKENS = 4
"""Tokens of a tile of scores."""
_SIMD_WIDTH = min(SHAPE.simd_width, 8)
# Accumulators of a tile per head; registers must hold those of all heads.
_VECTORS = 4
_MAX_HEADS = 4 if SHAPE.rows * SHAPE.vectors >= 24 else 2
MIX_WIDTH = _VECTORS * _SIMD_WIDTH
"""head_dim must be a multiple of this."""


def _emit_scores(builder: Any, num_heads: int, args: Any) -> None:
    q, keys, stride, dim, scores, row_bytes, ahead = args
    emitter = Emitter(builder, num_heads, _SIMD_WIDTH, TOKENS)
    nothing = ir.Constant(emitter.vector, [0.0] * _SIMD_WIDTH)
    sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(num_heads * TOKENS)]
    at = cgutils.alloca_once_value(builder, ir.Constant(LONG, 0))
    head_bytes = builder.mul(dim, ir.Constant(LONG, FLOAT_BYTES))
    lines = ir.Constant(LONG, LINE_BYTES // (_SIMD_WIDTH * FLOAT_BYTES))
    with cgutils.for_range(builder, builder.udiv(dim, ir.Constant(LONG, _SIMD_WIDTH))):
        offset = builder.load(at)
        emitter.prefetch(builder.add(ahead, builder.mul(offset, lines)))
        token = builder.add(keys, offset)
        values = []
        for _ in range(TOKENS):
            values.append(emitter.load(token, 0))
            token = builder.add(token, stride)
        query = builder.add(q, offset)
        for head in range(num_heads):
            factor = emitter.load(query, 0)
            query = builder.add(query, head_bytes)
            for number, value in enumerate(values):
                place = sums[head * TOKENS + number]
                builder.store(emitter.fma(value, factor, place), place)
        builder.store(builder.add(offset, ir.Constant(LONG, _SIMD_WIDTH * FLOAT_BYTES)), at)
    for head in range(num_heads):
        mine = [builder.load(sums[head * TOKENS + number]) for number in range(TOKENS)]
        _store_sums(builder, mine, scores)
        scores = builder.add(scores, row_bytes)


def _store_sums(builder: Any, vectors: list[Any], target: Any) -> None:
    """Store the horizontal sums of four vectors one behind the other."""
    simd_width = _SIMD_WIDTH
    while simd_width > TOKENS:
        simd_width //= 2
        vectors = [
            builder.fadd(
                _pick(builder, v, v, range(simd_width)),
                _pick(builder, v, v, range(simd_width, 2 * simd_width)),
            )
            for v in vectors
        ]
    while len(vectors) > 1:
        even, odd = range(0, 2 * TOKENS, 2), range(1, 2 * TOKENS, 2)
        vectors = [
            builder.fadd(_pick(builder, a, b, even), _pick(builder, a, b, odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    kind = ir.VectorType(ir.FloatType(), TOKENS).as_pointer()
    builder.store(vectors[0], builder.inttoptr(target, kind), align=FLOAT_BYTES)


def _pick(builder: Any, a: Any, b: Any, simd_width: range) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(simd_width)), list(simd_width))
    return builder.shuffle_vector(a, b, mask)


def _emit_mix(builder: Any, num_heads: int, args: Any) -> None:
    scores, row_bytes, values, stride, count, sums_at, sum_bytes, ahead = args
    emitter = Emitter(builder, num_heads, _SIMD_WIDTH, _VECTORS)
    sums = emitter.start(sums_at, sum_bytes)
    score_at = cgutils.alloca_once_value(builder, scores)
    value_at = cgutils.alloca_once_value(builder, values)
    ahead_at = cgutils.alloca_once_value(builder, ahead)

    def tokens(num_tokens: int) -> None:
        score, value, fetched = (builder.load(at) for at in (score_at, value_at, ahead_at))
        rows = [score]
        for _ in range(num_heads - 1):
            rows.append(builder.add(rows[-1], row_bytes))
        # One load holds all tokens of a head; each element of it is one factor.
        vectors = [emitter.load(row, 0) for row in rows] if num_tokens == _SIMD_WIDTH else []
        for token in range(num_tokens):
            emitter.prefetch(fetched)
            fetched = builder.add(fetched, ir.Constant(LONG, LINE_BYTES))
            column = [emitter.spread(vector, token) for vector in vectors]
            column = column or [emitter.spread_load(row, token) for row in rows]
            emitter.step(column, value, 0, sums)
            value = builder.add(value, stride)
        builder.store(fetched, ahead_at)
        builder.store(value, value_at)
        builder.store(builder.add(score, ir.Constant(LONG, num_tokens * FLOAT_BYTES)), score_at)

    whole = ir.Constant(LONG, TOKENS)
    with cgutils.for_range(builder, builder.udiv(count, whole)):
        tokens(TOKENS)
    with cgutils.for_range(builder, builder.urem(count, whole)):
        tokens(1)
    emitter.finish(sums_at, sum_bytes, sums)


def _largest(_, start, count):
    """Return the largest of the floats; NaN only if all of them are NaN."""

    def code(context, builder, signature, values):
        start, count = values
        emitter = Emitter(builder, 1, _SIMD_WIDTH, 1)
        number = ir.FloatType()
        insert = cgutils.get_or_insert_function
        of_two = ir.FunctionType(emitter.vector, [emitter.vector] * 2)
        larger = insert(builder.module, of_two, f"llvm.maxnum.v{_SIMD_WIDTH}f32")
        best = cgutils.alloca_once_value(builder, emitter.spread_load(start, 0))
        at = cgutils.alloca_once_value(builder, start)

        def take(value: Any, num_floats: int) -> None:
            builder.store(builder.call(larger, [builder.load(best), value]), best)
            distance = ir.Constant(LONG, num_floats * FLOAT_BYTES)
            builder.store(builder.add(builder.load(at), distance), at)

        simd_width = ir.Constant(LONG, _SIMD_WIDTH)
        with cgutils.for_range(builder, builder.udiv(count, simd_width)):
            take(emitter.load(builder.load(at), 0), _SIMD_WIDTH)
        with cgutils.for_range(builder, builder.urem(count, simd_width)):
            take(emitter.spread_load(builder.load(at), 0), 1)
        kind = ir.FunctionType(number, [emitter.vector])
        reduce = insert(builder.module, kind, f"llvm.vector.reduce.fmax.v{_SIMD_WIDTH}f32")
        return builder.call(reduce, [builder.load(best)])

    return types.float32(types.int64, types.int64), code


largest: Any = intrinsic(_largest)

_scores_4, _scores_3, _scores_2, _scores_1 = (
    tile_of(_emit_scores, min(num_heads, _MAX_HEADS)) for num_heads in (4, 3, 2, 1)
)
_mix_4, _mix_3, _mix_2, _mix_1 = (
    tile_of(_emit_mix, min(num_heads, _MAX_HEADS)) for num_heads in (4, 3, 2, 1)
)


@njit(inline="always", error_model="numpy")
def heads_at(head, stop):
    """Return the number of heads of the tile that begins at h."""
    return min(stop - head, _MAX_HEADS)


@njit("void(int64, UniTuple(int64, 7))", **OPTIONS)
def score_tile(num_heads, args):
    """args: q, keys, stride, dim, scores, row_bytes, ahead; addresses, and distances in bytes.

    scores[h, t] = q[h] . keys[t] for TOKENS tokens; q [heads, dim], keys [tokens, stride]. As many
    bytes as the tile reads of keys are on their way to the cache afterwards, from `ahead` on.
    """
    if num_heads == 4:
        _scores_4(args)
    elif num_heads == 3:
        _scores_3(args)
    elif num_heads == 2:
        _scores_2(args)
    else:
        _scores_1(args)


@njit("void(int64, UniTuple(int64, 8))", **OPTIONS)
def mix_tile(num_heads, args):
    """args: scores, row_bytes, values, stride, count, sums, sum_bytes, ahead.

    sums[h, :MIX_WIDTH] += scores[h, t] * values[t, :MIX_WIDTH], token after token, each of which
    fetches a line from `ahead` on.
    """
    if num_heads == 4:
        _mix_4(args)
    elif num_heads == 3:
        _mix_3(args)
    elif num_heads == 2:
        _mix_2(args)
    else:
        _mix_1(args)
