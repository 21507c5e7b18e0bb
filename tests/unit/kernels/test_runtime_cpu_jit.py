from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="no numba on this machine")

import numba

from loramux.kernels.cpu_jit import runtime as math_numba


@numba.njit
def _exp_of_all(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    for i in range(values.size):
        out[i] = math_numba.exp(values[i])
    return out


def test_exp_is_within_two_units_of_the_true_value() -> None:
    values = np.linspace(-86, 87, 20001, dtype=np.float32)
    exact = np.exp(values.astype(np.float64))
    assert np.max(np.abs(_exp_of_all(values) / exact - 1)) < 2 * np.finfo(np.float32).eps


def test_exp_of_what_has_no_float32_stays_finite_and_nan_stays_nan() -> None:
    low, high, masked, broken = _exp_of_all(np.array([-1e4, 1e4, -np.inf, np.nan], np.float32))
    assert 0 <= low < 1e-37 and 1e37 < high < np.inf and 0 <= masked < 1e-37
    assert np.isnan(broken)


def test_kernels_use_as_many_threads_as_torch() -> None:
    math_numba.use_threads(1)
    assert numba.get_num_threads() == 1
    math_numba.use_threads(10**6)
    assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
    math_numba.use_threads(torch.get_num_threads())


@numba.njit(parallel=True)
def _take_all(counter: np.ndarray, owners: np.ndarray) -> None:
    address = counter.ctypes.data
    for thread in numba.prange(4):
        number = math_numba.take_next(address)
        while number < owners.size:
            owners[number] += 1 + 0 * thread
            number = math_numba.take_next(address)


def test_no_two_threads_take_the_same_and_nothing_is_left() -> None:
    counter, owners = np.zeros(1, np.int64), np.zeros(5000, np.int64)
    _take_all(counter, owners)
    assert (owners == 1).all()


@numba.njit
def _copy_by_address(source: np.ndarray, ids: np.ndarray, target: np.ndarray) -> None:
    numbers = math_numba.longs_at(ids.ctypes.data, ids.size)
    for i in range(ids.size):
        math_numba.floats_at(target.ctypes.data + 4 * i, 1)[0] = source[numbers[i]]


def test_arrays_at_an_address_are_that_memory() -> None:
    source, target = np.arange(9, dtype=np.float32), np.zeros(3, np.float32)
    _copy_by_address(source, np.array([8, 0, 4], np.int64), target)
    assert target.tolist() == [8, 0, 4]


@numba.njit(parallel=True)
def _fill_then_add(counters: np.ndarray, values: np.ndarray, totals: np.ndarray) -> None:
    taken, done = counters.ctypes.data, counters.ctypes.data + 64
    for thread in numba.prange(4):
        number = math_numba.take_next(taken)
        while number < values.size:
            values[number] = number
            math_numba.add_done(done, 1)
            number = math_numba.take_next(taken)
        math_numba.wait_for(done, values.size)
        totals[thread] = values.sum()


def test_who_has_waited_sees_what_all_have_written_though_some_never_ran_beside_it() -> None:
    """With fewer threads than parts, one thread computes several, one after the other."""
    for num_threads in (1, torch.get_num_threads()):
        math_numba.use_threads(num_threads)
        for _ in range(20):
            totals = np.zeros(4, np.int64)
            _fill_then_add(np.zeros(16, np.int64), np.zeros(1000, np.int64), totals)
            assert (totals == 499500).all()
    math_numba.use_threads(torch.get_num_threads())
