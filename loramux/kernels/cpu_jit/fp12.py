"""Packs the rank blocks of bfloat16 modules, A as fp12 and B with the scale: one pass, no GIL.

`adapters/packed/fp12.py` describes the format. The numpy code there writes the same bytes; on 16
threads its calls wait for the GIL most of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, types, uint16, uint32

from loramux.kernels.cpu_jit.runtime import OPTIONS

# Values are rounded one by one; no sums are reordered.
_ROUNDING: dict[str, Any] = {**OPTIONS, "fastmath": False}
_OCTET = 8
_COLUMNS = 128
_MAGNITUDE = np.uint16(0x7FFF)
_MANTISSA_BITS = 7
_BIAS = 127
_LOWEST = 112
_LARGEST_EXPONENT = 60
_STEPS_BITS = 21


@njit(float32(uint32), inline="always", **_ROUNDING)
def _as_float(bits):
    return np.uint32(bits).view(np.float32)


@njit(float32(int64), inline="always", **_ROUNDING)
def _power_of_two(exponent):
    """2^exponent within the range of normal float32."""
    return _as_float(np.uint32((exponent + 127) << 23))


@njit(int64(uint16, int64), inline="always", **_ROUNDING)
def _code(magnitude, exponent):
    """Exponent and mantissa of a value / 2^exponent in bits 10 .. 0."""
    code = np.int64(magnitude) - ((exponent + _LOWEST) << _MANTISSA_BITS)
    if code < 1 << _MANTISSA_BITS:
        value = _as_float(np.uint32(magnitude) << np.uint32(16))
        code = np.int64(np.rint(value * _power_of_two(_STEPS_BITS - exponent)))
    return code


@njit(
    types.void(
        types.Array(uint16, 2, "C", readonly=True),
        uint32[:, :, ::1],
        uint16[::1],
        int64[::1],
    ),
    **_ROUNDING,
)
def pack_a(a, words, largest, exponents):
    """Write rows [ranks, width] to words [octets, 3, width], with their maxima and exponents."""
    num_rows, width = a.shape
    words[:] = 0
    for row in range(num_rows):
        most = np.uint16(0)
        for column in range(width):
            most = max(most, np.uint16(a[row, column] & _MAGNITUDE))
        largest[row] = most
        exponent = np.int64(0)
        if most > 0:
            exponent = np.int64(most >> _MANTISSA_BITS) - _BIAS
            exponent = max(exponent, np.int64(-_LARGEST_EXPONENT))
            exponent = min(exponent, np.int64(_LARGEST_EXPONENT))
        exponents[row] = exponent
        out = words[row // _OCTET]
        for start in range(0, width, 4):
            low = np.uint32(0)
            high = np.uint32(0)
            for byte in range(4):
                bits = a[row, start + byte]
                code = _code(np.uint16(bits & _MAGNITUDE), exponent)
                sign = np.int64(bits >> 8) & 0x80
                low |= np.uint32(code & 0xFF) << np.uint32(8 * byte)
                high |= np.uint32(((code >> 8) & 7) | sign) << np.uint32(8 * byte)
            # From the highest bit: block, word pair, plane, word, thread (2).
            word_number = start // 4
            thread = word_number & 3
            word = (word_number >> 2) & 1
            plane = (word_number >> 3) & 1
            pair = (word_number >> 4) & 1
            block = start // _COLUMNS
            place = ((block * _OCTET + row % _OCTET) * 4 + thread) * 2 + pair
            out[plane, place * 2 + word] = low
            if word:
                high = (high >> np.uint32(4)) | (high << np.uint32(28))
            out[2, place * 2 + plane] |= high


@njit(
    types.void(
        types.Array(uint16, 2, "A", readonly=True),
        float32,
        int64[::1],
        uint16[:, ::1],
        uint16[::1],
    ),
    **_ROUNDING,
)
def pack_b(b, scale, exponents, out, largest):
    """Write scale * 2^exponent * b [width, ranks] to out [ranks, width], and the maxima of b."""
    width, num_ranks = b.shape
    for rank in range(num_ranks):
        factor = scale * _power_of_two(exponents[rank])
        most = np.uint16(0)
        for column in range(width):
            bits = b[column, rank]
            most = max(most, np.uint16(bits & _MAGNITUDE))
            value = np.float32(_as_float(np.uint32(bits) << np.uint32(16)) * factor)
            raw = value.view(np.uint32)
            raw += np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))
            out[rank, column] = np.uint16(raw >> np.uint32(16))
        largest[rank] = most
