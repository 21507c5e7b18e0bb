"""Fast on a CPU, in float32: x @ weight.T + bias over weights that were packed once into panels.

A tile of y, some rows by one panel's columns, stays in vector registers while a loop runs over the
inner dimension: each step loads one column of x's rows and one row of the panel. Every element of
y is one chain of fused multiplications and additions in the order of that dimension, whatever the
tile, so that a row has the same bits among any others.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import get_num_threads, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from loramux.kernels.math_numba import OPTIONS


@dataclass(frozen=True, slots=True)
class TileShape:
    lanes: int
    """Floats of one vector register."""
    vectors: int
    """A panel is as wide as so many of them."""
    rows: int
    max_depth: int
    """Of the part of a panel that should stay in the nearest cache."""
    is_fused: bool = True
    """Has the CPU got an instruction that multiplies and adds?"""


def tile_shape(machine: str, features: dict[str, bool]) -> TileShape:
    """As many accumulators as registers allow, beside those for a panel's row and x's column."""
    if machine in ("aarch64", "arm64"):
        return TileShape(lanes=4, vectors=3, rows=8, max_depth=640)
    if features.get("avx512f"):
        return TileShape(lanes=16, vectors=3, rows=8, max_depth=384)
    if features.get("avx2") and features.get("fma"):
        return TileShape(lanes=8, vectors=2, rows=6, max_depth=384)
    return TileShape(lanes=4, vectors=2, rows=4, max_depth=384, is_fused=False)


SHAPE = tile_shape(platform.machine(), binding.get_host_cpu_features())
WIDTH = SHAPE.lanes * SHAPE.vectors
_ROWS = SHAPE.rows
_FLOAT_BYTES = 4
_UNROLL = 4
# So many rows of x stay in the second cache while all panels go by.
_BLOCK_ROWS = 256
# With more elements of x than this, all threads pack it.
_PARALLEL_ELEMENTS = 65536
# The part of the panels that is given out one by one, to whoever is there first.
_SHARED_PART = 4

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, SHAPE.lanes)
_LONG = ir.IntType(64)
_INT = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    in_features: int
    out_features: int
    depth: int
    """Of one part of the inner dimension."""
    panels: NDArray[np.float32]
    """The parts, in each the panels, in each [depth, WIDTH]; zeros behind the last column."""
    start: NDArray[np.float32]
    """What y begins with: the bias, or zeros, as wide as all panels."""


def pack(weight: Tensor, bias: Tensor | None) -> PackedMatrix:
    """weight [out, in], bias [out]"""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // WIDTH)
    padded = torch.zeros(num_panels * WIDTH, in_features)
    padded[:out_features] = weight
    start = torch.zeros(num_panels * WIDTH)
    if bias is not None:
        start[:out_features] = bias
    panels, at = torch.empty(padded.numel()), 0
    depth = part_depth(in_features)
    for k in range(0, in_features, depth):
        part = padded[:, k : k + depth]
        target = panels[at : at + part.numel()].view(num_panels, part.shape[1], WIDTH)
        target.copy_(part.reshape(num_panels, WIDTH, -1).transpose(1, 2))
        at += part.numel()
    return PackedMatrix(in_features, out_features, depth, panels.numpy(), start.numpy())


def part_depth(in_features: int) -> int:
    """The inner dimension in equal parts, but for the last."""
    num_parts = max(1, -(-in_features // SHAPE.max_depth))
    return max(1, -(-in_features // num_parts))


def multiply(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [rows, in] -> [rows, out]"""
    y = np.empty((x.shape[0], matrix.out_features), dtype=np.float32)
    multiply_into(x.contiguous().numpy(), matrix, y)
    return torch.from_numpy(y)


def multiply_into(x: NDArray[np.float32], matrix: PackedMatrix, y: NDArray[np.float32]) -> None:
    """Both without gaps between their rows."""
    _multiply(x, matrix.panels, matrix.start, y, matrix.depth, get_num_threads())


class _Emitter:
    """Writes the code of one tile at the place where `builder` is."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        self.builder = builder
        self.num_rows = num_rows
        suffix = f"v{SHAPE.lanes}f32"
        insert = cgutils.get_or_insert_function
        of_three = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self._fma = insert(builder.module, of_three, f"llvm.fma.{suffix}")
        of_address = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
        self._prefetch = insert(builder.module, of_address, "llvm.prefetch.p0i8")

    def address(self, base: Any, num_floats: int, kind: Any) -> Any:
        offset = ir.Constant(_LONG, num_floats * _FLOAT_BYTES)
        return self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())

    def load(self, base: Any, num_floats: int, kind: Any = _VECTOR) -> Any:
        return self.builder.load(self.address(base, num_floats, kind), align=_FLOAT_BYTES)

    def prefetch(self, address: Any) -> None:
        """For reading, into the second cache: the nearest is full of this tile's operands."""
        hints = [ir.Constant(_INT, value) for value in (0, 2, 1)]
        self.builder.call(self._prefetch, [self.builder.inttoptr(address, _BYTES), *hints])

    def start(self, base: Any, stride: Any) -> list[Any]:
        """The accumulators, row after row."""
        sums = []
        for _ in range(self.num_rows):
            for v in range(SHAPE.vectors):
                value = self.load(base, v * SHAPE.lanes)
                sums.append(cgutils.alloca_once_value(self.builder, value))
            base = self.builder.add(base, stride)
        return sums

    def step(self, x: Any, panel: Any, number: int, sums: list[Any]) -> None:
        row = [self.load(panel, number * WIDTH + v * SHAPE.lanes) for v in range(SHAPE.vectors)]
        column = self._column(x, number * self.num_rows)
        for i, factor in enumerate(column):
            for v, value in enumerate(row):
                place = sums[i * SHAPE.vectors + v]
                self.builder.store(self._add_product(value, factor, place), place)

    def finish(self, base: Any, stride: Any, sums: list[Any]) -> None:
        for i in range(self.num_rows):
            for v in range(SHAPE.vectors):
                value = self.builder.load(sums[i * SHAPE.vectors + v])
                target = self.address(base, v * SHAPE.lanes, _VECTOR)
                self.builder.store(value, target, align=_FLOAT_BYTES)
            base = self.builder.add(base, stride)

    def _column(self, x: Any, start: int) -> list[Any]:
        """One vector a row, its value in all lanes."""
        if SHAPE.lanes == 4 and self.num_rows % 4 == 0:
            fours = [self.load(x, start + i) for i in range(0, self.num_rows, 4)]
            return [self._spread(fours[i // 4], i % 4) for i in range(self.num_rows)]
        values = [self.load(x, start + i, _FLOAT) for i in range(self.num_rows)]
        empty, first = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INT, 0)
        insert = self.builder.insert_element
        return [self._spread(insert(empty, value, first), 0) for value in values]

    def _spread(self, vector: Any, lane: int) -> Any:
        lanes = ir.Constant(ir.VectorType(_INT, SHAPE.lanes), [lane] * SHAPE.lanes)
        return self.builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), lanes)

    def _add_product(self, value: Any, factor: Any, place: Any) -> Any:
        total = self.builder.load(place)
        if SHAPE.is_fused:
            return self.builder.call(self._fma, [value, factor, total])
        return self.builder.fadd(total, self.builder.fmul(value, factor))


def _emit_tile(builder: Any, num_rows: int, args: Any) -> None:
    x, panel, start, start_stride, y, y_stride, depth, ahead, ahead_step = args
    emitter = _Emitter(builder, num_rows)
    sums = emitter.start(start, start_stride)
    x_at = cgutils.alloca_once_value(builder, x)
    panel_at = cgutils.alloca_once_value(builder, panel)
    ahead_at = cgutils.alloca_once_value(builder, ahead)

    def advance(place: Any, distance: Any) -> None:
        builder.store(builder.add(builder.load(place), distance), place)

    def steps(count: int) -> None:
        operands = builder.load(x_at), builder.load(panel_at)
        for number in range(count):
            emitter.step(*operands, number, sums)
        advance(x_at, ir.Constant(_LONG, count * num_rows * _FLOAT_BYTES))
        advance(panel_at, ir.Constant(_LONG, count * WIDTH * _FLOAT_BYTES))

    unroll = ir.Constant(_LONG, _UNROLL)
    with cgutils.for_range(builder, builder.udiv(depth, unroll)):
        emitter.prefetch(builder.load(ahead_at))
        advance(ahead_at, ahead_step)
        steps(_UNROLL)
    with cgutils.for_range(builder, builder.urem(depth, unroll)):
        steps(1)
    emitter.finish(y, y_stride, sums)


def _tile_of(num_rows: int) -> Any:
    """tile((x, panel, start, start_stride, y, y_stride, depth, ahead, ahead_step)), in bytes:
    y[i] = start[i] + x[:, i] @ panel, and what lies `ahead` is on its way to the cache."""

    @intrinsic
    def tile(_, args):
        def code(context, builder, signature, values):
            _emit_tile(builder, num_rows, cgutils.unpack_tuple(builder, values[0]))
            return context.get_dummy_value()

        return types.void(args), code

    return tile


@intrinsic
def _take_next(_, address):
    """The value there, which is one more afterwards: no two threads get the same."""

    def code(context, builder, signature, values):
        place = builder.inttoptr(values[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "monotonic")

    return types.int64(types.int64), code


_tile_full = _tile_of(_ROWS)
_tile_4 = _tile_of(4)
_tile_2 = _tile_of(2)
_tile_1 = _tile_of(1)


@njit("void(int64, UniTuple(int64, 9))", **OPTIONS)
def _tile(num_rows, args):
    if num_rows == _ROWS:
        _tile_full(args)
    elif num_rows == 4:
        _tile_4(args)
    elif num_rows == 2:
        _tile_2(args)
    else:
        _tile_1(args)


@njit(inline="always", error_model="numpy")
def _rows_at(row, stop):
    """How many rows the tile that begins there has: all that fit, then 4, 2 and 1."""
    left = stop - row
    if left >= _ROWS:
        return _ROWS
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


@njit("void(float32[:, ::1], int64, int64, float32[::1])", **OPTIONS)
def _pack_eight(x, row, k, out):
    count = out.size // 8
    x0, x1, x2, x3 = x[row, k:], x[row + 1, k:], x[row + 2, k:], x[row + 3, k:]
    x4, x5, x6, x7 = x[row + 4, k:], x[row + 5, k:], x[row + 6, k:], x[row + 7, k:]
    for i in range(count):
        at = i * 8
        out[at], out[at + 1], out[at + 2], out[at + 3] = x0[i], x1[i], x2[i], x3[i]
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = x4[i], x5[i], x6[i], x7[i]


@njit("void(float32[:, ::1], int64, int64, int64, float32[::1])", **OPTIONS)
def _pack_tile(x, row, num_rows, depth, packed):
    """Rows row.. of x, columns first, in each part of the inner dimension: [depth, num_rows]."""
    total_rows, size = x.shape
    for k in range(0, size, depth):
        count = min(depth, size - k)
        out = packed[k * total_rows + row * count :][: num_rows * count]
        if num_rows == 8:
            _pack_eight(x, row, k, out)
            continue
        for i in range(num_rows):
            for j in range(count):
                out[j * num_rows + i] = x[row + i, k + j]


@njit("void(float32[:, ::1], int64, float32[::1])", **OPTIONS)
def _pack_x(x, depth, packed):
    row = 0
    while row < x.shape[0]:
        num_rows = _rows_at(row, x.shape[0])
        _pack_tile(x, row, num_rows, depth, packed)
        row += num_rows


@njit("void(float32[:, ::1], int64, float32[::1])", parallel=True, **OPTIONS)
def _pack_x_parallel(x, depth, packed):
    full = x.shape[0] // _ROWS
    for number in prange(full):
        _pack_tile(x, number * _ROWS, _ROWS, depth, packed)
    row = full * _ROWS
    while row < x.shape[0]:
        num_rows = _rows_at(row, x.shape[0])
        _pack_tile(x, row, num_rows, depth, packed)
        row += num_rows


@njit(
    "void(float32[::1], float32[::1], float32[::1], float32[:, ::1], UniTuple(int64, 3),"
    "UniTuple(int64, 4))",
    **OPTIONS,
)
def _panel_part(packed, panels, start, y, rows, place):
    """Rows rows[0] to rows[1] of y, one panel's columns, over one part of the inner dimension."""
    row, stop, total_rows = rows
    number, column, k, depth = place
    x = packed.ctypes.data + k * total_rows * _FLOAT_BYTES
    panel = panels.ctypes.data + (k * start.size + number * WIDTH * depth) * _FLOAT_BYTES
    first = start.ctypes.data + number * WIDTH * _FLOAT_BYTES
    y_stride = y.shape[1] * _FLOAT_BYTES
    # A piece of the panel behind this one with each tile.
    step = max(1, _UNROLL * WIDTH * _FLOAT_BYTES * _ROWS // (stop - row))
    ahead = panel + depth * WIDTH * _FLOAT_BYTES
    while row < stop:
        num_rows = _rows_at(row, stop)
        target = y.ctypes.data + row * y_stride + column * _FLOAT_BYTES
        begin, stride = (first, 0) if k == 0 else (target, y_stride)
        x_at = x + row * depth * _FLOAT_BYTES
        _tile(num_rows, (x_at, panel, begin, stride, target, y_stride, depth, ahead, step))
        ahead += depth // _UNROLL * step
        row += num_rows


@njit(
    "void(float32[::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1],"
    "UniTuple(int64, 7))",
    **OPTIONS,
)
def _panels(packed, panels, start, y, tail, place):
    """Panels from `begin` to `end`; a last one that is wider than what is left of y: into tail."""
    row, stop, total_rows, begin, end, size, depth = place
    rows = (row, stop, total_rows)
    num_whole = y.shape[1] // WIDTH
    for k in range(0, size, depth):
        count = min(depth, size - k)
        for number in range(begin, min(end, num_whole)):
            at = (number, number * WIDTH, k, count)
            _panel_part(packed, panels, start, y, rows, at)
        if end > num_whole:
            _panel_part(packed, panels, start, tail, rows, (num_whole, 0, k, count))


@njit(
    "void(float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], int64, int64)",
    parallel=True,
    **OPTIONS,
)
def _multiply(x, panels, start, y, depth, num_threads):
    packed = np.empty(x.size, dtype=np.float32)
    if x.size >= _PARALLEL_ELEMENTS:
        _pack_x_parallel(x, depth, packed)
    else:
        _pack_x(x, depth, packed)
    total_rows, size = x.shape
    num_panels = start.size // WIDTH
    own = num_panels * (_SHARED_PART - 1) // _SHARED_PART // num_threads
    num_blocks = (total_rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    rest = y.shape[1] % WIDTH
    tail = np.empty((total_rows if rest else 0, WIDTH), dtype=np.float32)
    taken = np.zeros(num_blocks, dtype=np.int64)
    for thread in prange(num_threads):
        for block in range(num_blocks):
            row = block * _BLOCK_ROWS
            stop = min(row + _BLOCK_ROWS, total_rows)
            begin, end = thread * own, (thread + 1) * own
            while begin < num_panels:
                place = (row, stop, total_rows, begin, end, size, depth)
                _panels(packed, panels, start, y, tail, place)
                counter = taken.ctypes.data + block * 8
                begin = num_threads * own + _take_next(counter)  # type: ignore[call-arg]
                end = begin + 1
    if rest:
        y[:, y.shape[1] - rest :] = tail[:, :rest]
