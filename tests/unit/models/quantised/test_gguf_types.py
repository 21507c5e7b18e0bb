"""Blocks of GGUF types against their definitions, written out element by element."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from loramux.errors import UnsupportedModel
from loramux.models.gguf_file import dequantized
from loramux.models.gguf_reader import GgufTensor

NUM_BLOCKS = 3


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def q4_0(block: bytes) -> list[float]:
    d, codes = half(block[:2]), block[2:]
    return [d * ((codes[i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[float]:
    d, m, codes = half(block[:2]), half(block[2:4]), block[4:]
    return [d * (codes[i % 16] >> 4 * (i // 16) & 15) + m for i in range(32)]


def fifth(bits: bytes, i: int) -> int:
    return (int.from_bytes(bits, "little") >> i & 1) << 4


def q5_0(block: bytes) -> list[float]:
    d, high, codes = half(block[:2]), block[2:6], block[6:]
    values = [(codes[i % 16] >> 4 * (i // 16) & 15) | fifth(high, i) for i in range(32)]
    return [d * (value - 16) for value in values]


def q5_1(block: bytes) -> list[float]:
    d, m, high, codes = half(block[:2]), half(block[2:4]), block[4:8], block[8:]
    values = [(codes[i % 16] >> 4 * (i // 16) & 15) | fifth(high, i) for i in range(32)]
    return [d * value + m for value in values]


def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * code for code in np.frombuffer(block[2:], np.int8).tolist()]


def scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    """Six bits each of eight scales and eight minima in twelve bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    low, high = packed[j + 4], (packed[j - 4] >> 6, packed[j] >> 6)
    return low & 15 | high[0] << 4, low >> 4 | high[1] << 4


def q4_k(block: bytes) -> list[float]:
    return k_quant(block, block[16:], [0] * 256)


def q5_k(block: bytes) -> list[float]:
    high = [(block[16 + i % 32] >> i // 32 & 1) << 4 for i in range(256)]
    return k_quant(block, block[48:], high)


def k_quant(block: bytes, codes: bytes, high: list[int]) -> list[float]:
    d, smallest, found = half(block[:2]), half(block[2:4]), []
    for i in range(256):
        scale, minimum = scale_and_min(block[4:16], i // 32)
        code = codes[i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15 | high[i]
        found.append(d * scale * code - smallest * minimum)
    return found


def q6_k(block: bytes) -> list[float]:
    low, high, d = block[:128], block[128:192], half(block[208:])
    scales = np.frombuffer(block[192:208], np.int8).tolist()
    found = []
    for i in range(256):
        part, place = divmod(i, 128)
        code = low[part * 64 + place % 64] >> 4 * (place // 64) & 15
        code |= (high[part * 32 + place % 32] >> 2 * (place // 32) & 3) << 4
        found.append(d * scales[i // 16] * (code - 32))
    return found


# Type, bytes of a block, offsets of its float16 numbers, definition.
TYPES: dict[str, tuple[int, tuple[int, ...], Any]] = {
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q5_0": (22, (0,), q5_0),
    "Q5_1": (24, (0, 2), q5_1),
    "Q8_0": (34, (0,), q8_0),
    "Q4_K": (144, (0, 2), q4_k),
    "Q5_K": (176, (0, 2), q5_k),
    "Q6_K": (210, (208,), q6_k),
}


def tensor_of(name: str, raw: Any) -> GgufTensor:
    return GgufTensor(name, raw.shape, gguf.GGMLQuantizationType[name], raw)


def random_blocks(name: str) -> Any:
    size, halves, _ = TYPES[name]
    random = np.random.default_rng(size)
    raw = random.integers(0, 256, (NUM_BLOCKS, size), dtype=np.uint8)
    for offset in halves:
        numbers = random.normal(size=NUM_BLOCKS).astype(np.float16)
        raw[:, offset : offset + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return raw


@pytest.mark.parametrize("name", TYPES)
def test_elements_are_those_of_the_definition(name: str) -> None:
    raw = random_blocks(name)
    expected = [TYPES[name][2](block.tobytes()) for block in raw]
    found = dequantized(tensor_of(name, raw))
    np.testing.assert_allclose(found.reshape(NUM_BLOCKS, -1), expected, rtol=1e-6, atol=1e-6)


def test_a_scale_of_nan_is_refused() -> None:
    raw = random_blocks("Q4_0")
    raw[1, :2] = 0xFF
    with pytest.raises(UnsupportedModel, match=r"Q4_0 has NaN or infinite elements"):
        dequantized(tensor_of("Q4_0", raw))
