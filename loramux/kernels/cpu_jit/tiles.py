"""Register tiles of float32 GEMMs, emitted for this CPU's vector size, for the compiled loops.

A tile of y stays in registers while a loop runs over the inner dimension: each step loads a column
of x's rows and a row of the matrix. Every element of y is one chain of FMAs in the order of
that dimension, for every tile.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from loramux.kernels.cpu_jit.runtime import OPTIONS


@dataclass(frozen=True, slots=True)
class TileShape:
    simd_width: int
    """Floats of one vector register."""
    vectors: int
    """Vector registers across a panel."""
    rows: int
    max_depth: int
    """Depth of the block of a panel that should stay in the L1 cache."""
    is_fused: bool = True
    """Whether the CPU has FMA."""


def tile_shape(machine: str, features: dict[str, bool]) -> TileShape:
    """Return the largest tile whose accumulators, panel row and column of x fit the registers."""
    if machine in ("aarch64", "arm64"):
        return TileShape(simd_width=4, vectors=3, rows=8, max_depth=640)
    if features.get("avx512f"):
        return TileShape(simd_width=16, vectors=3, rows=8, max_depth=384)
    if features.get("avx2") and features.get("fma"):
        return TileShape(simd_width=8, vectors=2, rows=6, max_depth=384)
    return TileShape(simd_width=4, vectors=2, rows=4, max_depth=384, is_fused=False)


SHAPE = tile_shape(platform.machine(), binding.get_host_cpu_features())
WIDTH = SHAPE.simd_width * SHAPE.vectors
ROWS = SHAPE.rows
FLOAT_BYTES = 4
UNROLL = 4
# Direct tiles are for matrices that are not packed, LoRA's A and B: as wide as a cache line or half
# of it, and as high as leaves registers for the rows of x.
_DIRECT_SIMD_WIDTH = min(SHAPE.simd_width, 8)
DIRECT_WIDTH = 16
NARROW_WIDTH = 8
DIRECT_ROWS = 4
LINE_BYTES = 64
MAX_ROW_WIDTH = 12 * _DIRECT_SIMD_WIDTH

_FLOAT = ir.FloatType()
LONG = ir.IntType(64)
_INT = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


class Emitter:
    """Emits the code of one tile at the builder's position."""

    def __init__(self, builder: Any, num_rows: int, simd_width: int, vectors: int) -> None:
        self.builder = builder
        self.num_rows, self.simd_width, self.vectors = num_rows, simd_width, vectors
        self.vector = ir.VectorType(_FLOAT, simd_width)
        insert = cgutils.get_or_insert_function
        of_three = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = insert(builder.module, of_three, f"llvm.fma.v{simd_width}f32")
        of_address = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
        self._prefetch = insert(builder.module, of_address, "llvm.prefetch.p0i8")

    def address(self, base: Any, num_floats: int, kind: Any) -> Any:
        offset = ir.Constant(LONG, num_floats * FLOAT_BYTES)
        return self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())

    def load(self, base: Any, num_floats: int) -> Any:
        address = self.address(base, num_floats, self.vector)
        return self.builder.load(address, align=FLOAT_BYTES)

    def spread_load(self, base: Any, num_floats: int) -> Any:
        """One float, broadcast to a vector."""
        value = self.builder.load(self.address(base, num_floats, _FLOAT), align=FLOAT_BYTES)
        empty, first = ir.Constant(self.vector, ir.Undefined), ir.Constant(_INT, 0)
        return self.spread(self.builder.insert_element(empty, value, first), 0)

    def spread(self, vector: Any, element: int) -> Any:
        simd_width = ir.Constant(ir.VectorType(_INT, self.simd_width), [element] * self.simd_width)
        return self.builder.shuffle_vector(
            vector, ir.Constant(self.vector, ir.Undefined), simd_width
        )

    def prefetch(self, address: Any) -> None:
        """Prefetches into L2: L1 is full of this tile's operands."""
        hints = [ir.Constant(_INT, value) for value in (0, 2, 1)]
        self.builder.call(self._prefetch, [self.builder.inttoptr(address, _BYTES), *hints])

    def start(self, base: Any, stride: Any) -> list[Any]:
        """Return the accumulators, row after row."""
        sums = []
        for _ in range(self.num_rows):
            for v in range(self.vectors):
                value = self.load(base, v * self.simd_width)
                sums.append(cgutils.alloca_once_value(self.builder, value))
            base = self.builder.add(base, stride)
        return sums

    def step(self, column: list[Any], matrix_row: Any, offset: int, sums: list[Any]) -> None:
        """column: one broadcast vector per row of x"""
        values = [self.load(matrix_row, offset + v * self.simd_width) for v in range(self.vectors)]
        for i, factor in enumerate(column):
            for v, value in enumerate(values):
                place = sums[i * self.vectors + v]
                self.builder.store(self.fma(value, factor, place), place)

    def finish(self, base: Any, stride: Any, sums: list[Any]) -> None:
        for i in range(self.num_rows):
            for v in range(self.vectors):
                value = self.builder.load(sums[i * self.vectors + v])
                target = self.address(base, v * self.simd_width, self.vector)
                self.builder.store(value, target, align=FLOAT_BYTES)
            base = self.builder.add(base, stride)

    def packed_column(self, x: Any, start: int) -> list[Any]:
        if self.simd_width == 4 and self.num_rows % 4 == 0:
            fours = [self.load(x, start + i) for i in range(0, self.num_rows, 4)]
            return [self.spread(fours[i // 4], i % 4) for i in range(self.num_rows)]
        return [self.spread_load(x, start + i) for i in range(self.num_rows)]

    def fma(self, value: Any, factor: Any, place: Any) -> Any:
        total = self.builder.load(place)
        if SHAPE.is_fused:
            return self.builder.call(self._fma, [value, factor, total])
        return self.builder.fadd(total, self.builder.fmul(value, factor))


def _emit_packed(builder: Any, num_rows: int, args: Any) -> None:
    x, panel, start, start_stride, y, y_stride, depth, ahead, ahead_step = args
    emitter = Emitter(builder, num_rows, SHAPE.simd_width, SHAPE.vectors)
    sums = emitter.start(start, start_stride)
    x_at = cgutils.alloca_once_value(builder, x)
    panel_at = cgutils.alloca_once_value(builder, panel)
    ahead_at = cgutils.alloca_once_value(builder, ahead)

    def advance(place: Any, distance: Any) -> None:
        builder.store(builder.add(builder.load(place), distance), place)

    def steps(count: int) -> None:
        x_now, panel_now = builder.load(x_at), builder.load(panel_at)
        for number in range(count):
            column = emitter.packed_column(x_now, number * num_rows)
            emitter.step(column, panel_now, number * WIDTH, sums)
        advance(x_at, ir.Constant(LONG, count * num_rows * FLOAT_BYTES))
        advance(panel_at, ir.Constant(LONG, count * WIDTH * FLOAT_BYTES))

    unroll = ir.Constant(LONG, UNROLL)
    with cgutils.for_range(builder, builder.udiv(depth, unroll)):
        emitter.prefetch(builder.load(ahead_at))
        advance(ahead_at, ahead_step)
        steps(UNROLL)
    with cgutils.for_range(builder, builder.urem(depth, unroll)):
        steps(1)
    emitter.finish(y, y_stride, sums)


def _emit_direct(builder: Any, num_rows: int, args: Any, *, width: int) -> None:
    x, x_stride, matrix, matrix_stride, y, y_stride, depth = args
    emitter = Emitter(builder, num_rows, _DIRECT_SIMD_WIDTH, width // _DIRECT_SIMD_WIDTH)
    sums = emitter.start(y, y_stride)
    x_at = cgutils.alloca_once_value(builder, x)
    matrix_at = cgutils.alloca_once_value(builder, matrix)

    def step(column: list[Any]) -> None:
        row = builder.load(matrix_at)
        emitter.step(column, row, 0, sums)
        builder.store(builder.add(row, matrix_stride), matrix_at)

    def rows_of_x(num_steps: int) -> list[Any]:
        rows = [builder.load(x_at)]
        for _ in range(num_rows - 1):
            rows.append(builder.add(rows[-1], x_stride))
        distance = ir.Constant(LONG, num_steps * FLOAT_BYTES)
        builder.store(builder.add(rows[0], distance), x_at)
        return rows

    def single_step() -> None:
        step([emitter.spread_load(row, 0) for row in rows_of_x(1)])

    unroll = ir.Constant(LONG, UNROLL)
    with cgutils.for_range(builder, builder.udiv(depth, unroll)):
        if _DIRECT_SIMD_WIDTH == UNROLL:
            # One load holds all steps of a row; each element of it is one factor.
            vectors = [emitter.load(row, 0) for row in rows_of_x(UNROLL)]
            for element in range(UNROLL):
                step([emitter.spread(vector, element) for vector in vectors])
        else:
            for _ in range(UNROLL):
                single_step()
    with cgutils.for_range(builder, builder.urem(depth, unroll)):
        single_step()
    emitter.finish(y, y_stride, sums)


def _emit_row(builder: Any, vectors: int, args: Any) -> None:
    x, matrix, stride, y, depth = args
    emitter = Emitter(builder, 1, _DIRECT_SIMD_WIDTH, vectors)
    no_stride = ir.Constant(LONG, 0)
    sums = emitter.start(y, no_stride)
    x_at = cgutils.alloca_once_value(builder, x)
    matrix_at = cgutils.alloca_once_value(builder, matrix)

    def steps(count: int) -> None:
        x_now, row = builder.load(x_at), builder.load(matrix_at)
        for number in range(count):
            emitter.step([emitter.spread_load(x_now, number)], row, 0, sums)
            row = builder.add(row, stride)
        builder.store(builder.add(x_now, ir.Constant(LONG, count * FLOAT_BYTES)), x_at)
        builder.store(row, matrix_at)

    unroll = ir.Constant(LONG, UNROLL)
    with cgutils.for_range(builder, builder.udiv(depth, unroll)):
        steps(UNROLL)
    with cgutils.for_range(builder, builder.urem(depth, unroll)):
        steps(1)
    emitter.finish(y, no_stride, sums)


def tile_of(emit: Any, size: int) -> Any:
    """Return the tile that `emit` makes for a size, called with one tuple of integers."""

    @intrinsic
    def tile(_, args):
        def code(context, builder, signature, values):
            emit(builder, size, cgutils.unpack_tuple(builder, values[0]))
            return context.get_dummy_value()

        return types.void(args), code

    return tile


_packed_full, _packed_4 = tile_of(_emit_packed, ROWS), tile_of(_emit_packed, 4)
_packed_2, _packed_1 = tile_of(_emit_packed, 2), tile_of(_emit_packed, 1)
_emit_wide = partial(_emit_direct, width=DIRECT_WIDTH)
_emit_narrow = partial(_emit_direct, width=NARROW_WIDTH)
_wide_4, _wide_2, _wide_1 = (tile_of(_emit_wide, num_rows) for num_rows in (4, 2, 1))
_narrow_4, _narrow_2, _narrow_1 = (tile_of(_emit_narrow, num_rows) for num_rows in (4, 2, 1))
_row_12, _row_8, _row_6 = (tile_of(_emit_row, vectors) for vectors in (12, 8, 6))
_row_4, _row_2, _row_1 = (tile_of(_emit_row, vectors) for vectors in (4, 2, 1))


def _multiply_add(_, a, b, c):
    """Return a * b + c, rounded as the tiles round it."""

    def code(context, builder, signature, values):
        if not SHAPE.is_fused:
            return builder.fadd(builder.fmul(values[0], values[1]), values[2])
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), code


multiply_add: Any = intrinsic(_multiply_add)


@njit(inline="always", error_model="numpy")
def rows_at(row, stop):
    """Rows of the tile that begins at a row: the full height, then 4, 2 and 1."""
    left = stop - row
    if left >= ROWS:
        return ROWS
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@njit("void(int64, UniTuple(int64, 9))", **OPTIONS)
def packed_tile(num_rows, args):
    """args: x, panel, start, start_stride, y, y_stride, depth, ahead, ahead_step, in bytes.

    y = start + x.T @ panel, x [depth, num_rows], panel [depth, WIDTH], both without gaps; what lies
    `ahead` is on its way to the cache afterwards.
    """
    if num_rows == ROWS:
        _packed_full(args)
    elif num_rows == 4:
        _packed_4(args)
    elif num_rows == 2:
        _packed_2(args)
    else:
        _packed_1(args)


@njit(inline="always", error_model="numpy")
def direct_rows_at(row, stop):
    left = stop - row
    if left >= DIRECT_ROWS:
        return DIRECT_ROWS
    return 2 if left >= 2 else 1


@njit("void(int64, int64, UniTuple(int64, 7))", **OPTIONS)
def direct_tile(num_rows, width, args):
    """args: x, x_stride, matrix, matrix_stride, y, y_stride, depth, in bytes.

    y += x @ matrix, x [num_rows, depth], matrix [depth, width], with gaps between rows. The width
    is one of the two above.
    """
    if width == DIRECT_WIDTH:
        if num_rows == DIRECT_ROWS:
            _wide_4(args)
        elif num_rows == 2:
            _wide_2(args)
        else:
            _wide_1(args)
    elif num_rows == DIRECT_ROWS:
        _narrow_4(args)
    elif num_rows == 2:
        _narrow_2(args)
    else:
        _narrow_1(args)


@njit("int64(int64, UniTuple(int64, 5))", **OPTIONS)
def row_tile(width, args):
    """args: x, matrix, stride, y, depth, in bytes. Returns how many columns it did, 0: too few.

    y += x @ matrix, x [depth], matrix [depth, width], y [width], of its first columns as many as
    registers hold: for one row, a matrix that is wider should be read row by row.
    """
    vectors = width // _DIRECT_SIMD_WIDTH
    if vectors >= 12:
        _row_12(args)
        return 12 * _DIRECT_SIMD_WIDTH
    if vectors >= 8:
        _row_8(args)
        return 8 * _DIRECT_SIMD_WIDTH
    if vectors >= 6:
        _row_6(args)
        return 6 * _DIRECT_SIMD_WIDTH
    if vectors >= 4:
        _row_4(args)
        return 4 * _DIRECT_SIMD_WIDTH
    if vectors >= 2:
        _row_2(args)
        return 2 * _DIRECT_SIMD_WIDTH
    if vectors:
        _row_1(args)
    return vectors * _DIRECT_SIMD_WIDTH
