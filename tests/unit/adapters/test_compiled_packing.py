"""The compiled packing code writes the same bytes as numpy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.packed import compiled
from loramux.adapters.packed.image import mapped_buffer
from loramux.adapters.packed.packing import PagedPacking
from loramux.adapters.peft.parts import LoraModule
from loramux.kernels.select import select_fp12_packer
from loramux.types.model import LinearSpec, TargetModule

pytest.importorskip("numba", reason="the compiled code needs numba")

WIDTH, OUTPUTS = 256, 48
SITES = (LinearSpec("o", WIDTH, ("o_proj",), (OUTPUTS,)),)
TARGET = TargetModule(
    path="model.layers.0.self_attn.o_proj",
    layer=0,
    projection="o_proj",
    in_features=WIDTH,
    out_features=OUTPUTS,
)
PACKING = PagedPacking(SITES, torch.bfloat16, 2 * 2**16, mapped_buffer)


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    before = compiled.compiled_packer()
    compiled.use_packer(select_fp12_packer())
    assert compiled.compiled_packer() is not None
    yield
    compiled.use_packer(before)


def pack(module: LoraModule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layout = PACKING.plan({(0, "o_proj"): module.rank})
    buffer = PACKING.allocate(layout.num_elements, torch.bfloat16)
    maxima = PACKING.writer(layout, buffer)(module)
    return buffer.view(torch.int16).numpy().copy(), maxima.a, maxima.b


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    exponents=st.tuples(st.integers(-38, 18), st.integers(-38, 18)),
    spread=st.integers(0, 12),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
)
def test_both_write_the_same_bytes(
    rank: int, seed: int, exponents: tuple[int, int], spread: int, scale: float
) -> None:
    generator = np.random.default_rng(seed)

    def matrix(shape: tuple[int, int], exponent: int) -> torch.Tensor:
        values = generator.standard_normal(shape) * 10.0**exponent
        values *= 10.0 ** -generator.integers(0, spread + 1, size=shape).astype(float)
        values[generator.random(shape) < 0.05] = 0.0
        return torch.from_numpy(values).bfloat16()

    a, b = matrix((rank, WIDTH), exponents[0]), matrix((OUTPUTS, rank), exponents[1])
    if seed % 4 == 0:
        a[0], b[:, -1] = 0.0, 0.0
    module = LoraModule(TARGET, rank, rank, scale, a, b)
    found = pack(module)
    kept = compiled.compiled_packer()
    compiled.use_packer(None)
    try:
        expected = pack(module)
    finally:
        compiled.use_packer(kept)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("half", ["a", "b"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_seen(half: str, value: float) -> None:
    halves = {"a": torch.ones(3, WIDTH), "b": torch.ones(OUTPUTS, 3)}
    halves[half][1, 2] = value
    a, b = (tensor.bfloat16() for tensor in halves.values())
    _, *maxima = pack(LoraModule(TARGET, 3, 3, 1.0, a, b))
    finite = [bool(np.isfinite(found).all()) for found in maxima]
    assert finite == [half != "a", half != "b"]
