"""Register tiles: which of them a machine gets, and that all of them add in the same order."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="no numba on this machine")

from numba import njit

from loramux.kernels.cpu_jit import tiles as tile_numba
from loramux.kernels.cpu_jit.tiles import (
    DIRECT_ROWS,
    DIRECT_WIDTH,
    FLOAT_BYTES,
    MAX_ROW_WIDTH,
    NARROW_WIDTH,
    ROWS,
    WIDTH,
    TileShape,
)

DEPTHS = [1, 3, 4, 17]


@njit
def chain(x, matrix, y):
    """y += x @ matrix, one product after the other."""
    for i in range(y.shape[0]):
        for k in range(x.shape[1]):
            for j in range(y.shape[1]):
                y[i, j] = tile_numba.multiply_add(matrix[k, j], x[i, k], y[i, j])


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("num_rows", sorted({ROWS, 4, 2, 1}))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_packed_tile_is_one_chain_an_element(num_rows: int, depth: int) -> None:
    x, panel, start = random(num_rows, depth), random(depth, WIDTH), random(num_rows, WIDTH)
    packed, y = np.ascontiguousarray(x.T), np.zeros((num_rows, WIDTH + 3), np.float32)
    expected = start.copy()
    chain(x, panel, expected)
    tile_numba.packed_tile(
        num_rows,
        (
            packed.ctypes.data,
            panel.ctypes.data,
            start.ctypes.data,
            WIDTH * FLOAT_BYTES,
            y.ctypes.data,
            y.strides[0],
            depth,
            panel.ctypes.data,
            1,
        ),
    )
    assert np.array_equal(y[:, :WIDTH], expected)
    assert not y[:, WIDTH:].any()


@pytest.mark.parametrize("num_rows", [DIRECT_ROWS, 2, 1])
@pytest.mark.parametrize("width", [DIRECT_WIDTH, NARROW_WIDTH])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_direct_tile_is_the_same_chain(num_rows: int, width: int, depth: int) -> None:
    x, matrix = random(num_rows, depth + 2), random(depth, width + 1)
    y = random(num_rows, width + 3)
    expected = y.copy()
    chain(x[:, :depth], matrix[:, :width], expected[:, :width])
    sources = x.ctypes.data, x.strides[0], matrix.ctypes.data, matrix.strides[0]
    tile_numba.direct_tile(num_rows, width, (*sources, y.ctypes.data, y.strides[0], depth))
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 16, 24, 31, 48, 64, 100, 200])
@pytest.mark.parametrize("depth", DEPTHS)
def test_tiles_of_one_row_are_the_same_chain_as_far_as_they_go(width: int, depth: int) -> None:
    x, matrix, y = random(1, depth), random(depth, width), random(1, width)
    expected = y.copy()
    sources = x.ctypes.data, matrix.ctypes.data, matrix.strides[0]
    done = tile_numba.row_tile(width, (*sources, y.ctypes.data, depth))
    assert 0 <= done <= min(width, MAX_ROW_WIDTH)
    assert width - done < width or width < 8
    chain(x, matrix[:, :done], expected[:, :done])
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("num_rows", range(1, 2 * ROWS + 1))
def test_the_tiles_of_any_number_of_rows_end_where_the_rows_do(num_rows: int) -> None:
    row = 0
    while row < num_rows:
        count = tile_numba.rows_at(row, num_rows)
        assert count in (ROWS, 4, 2, 1)
        row += count
    assert row == num_rows


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("aarch64", {}, (4, 32)),
        ("x86_64", {"avx512f": True, "avx2": True, "fma": True}, (16, 32)),
        ("x86_64", {"avx2": True, "fma": True}, (8, 16)),
        ("x86_64", {"avx2": True}, (4, 16)),
        ("riscv64", {}, (4, 16)),
    ],
)
def test_a_tile_fits_the_registers_of_its_machine(
    machine: str, features: dict[str, bool], expected: tuple[int, int]
) -> None:
    simd_width, num_registers = expected
    shape: TileShape = tile_numba.tile_shape(machine, features)
    assert shape.simd_width == simd_width
    assert shape.rows * shape.vectors + shape.vectors < num_registers
    assert shape.is_fused == (machine == "aarch64" or features.get("fma", False))
