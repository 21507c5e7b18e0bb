"""Compare linears over quantised weights with products of their dequantised weights on a GPU.

    python -m tests.gpu.quantised_check

Errors are relative to the largest output. Inputs that are rounded to FP8 are compared with the
product of the rounded inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.kernels.gpu.gemm import quantised
from loramux.models.eight_bit_linear import EightBitLinear
from loramux.models.four_bit_linear import FourBitLinear
from loramux.types.model import LinearSpec

QuantisedLinear = EightBitLinear | FourBitLinear
ROWS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129, 256, 1000)
SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "small": (576, (576, 192, 192)),
}
LIMIT = 1e-2
"""Rounding of outputs to bfloat16, and of sums by tensor cores."""


def make_linear(name: str, *, rounds_inputs: bool, has_bias: bool) -> EightBitLinear:
    inputs, outputs = SHAPES[name]
    names = ("q_proj", "k_proj", "v_proj")[: len(outputs)]
    spec = LinearSpec(
        name=name, in_features=inputs, projections=names, out_features=outputs, has_bias=has_bias
    )
    linear = EightBitLinear(
        spec, quantised, dtype=torch.bfloat16, device="cuda", rounds_inputs=rounds_inputs
    )
    for projection in spec.members:
        for slot_name, slot in linear.slots(projection).items():
            shape = (projection.out_features, inputs)
            noise = torch.randn(shape if slot_name == "weight" else shape[:1], device="cuda")
            slot.fill(slot_name, noise * 0.02)
    return linear


def make_four_bit(name: str) -> FourBitLinear:
    inputs, outputs = SHAPES[name]
    names = ("q_proj", "k_proj", "v_proj")[: len(outputs)]
    spec = LinearSpec(name=name, in_features=inputs, projections=names, out_features=outputs)
    group = 128 if inputs % 256 == 0 else 32
    linear = FourBitLinear(spec, quantised, group=group, dtype=torch.bfloat16, device="cuda")
    for projection in spec.members:
        for slot in linear.slots(projection).values():
            noise = torch.randn(projection.out_features, inputs, device="cuda")
            slot.fill(projection.name, noise * 0.02)
    return linear


def expected(linear: QuantisedLinear, x: Tensor) -> Tensor:
    values = x.float()
    if isinstance(linear, EightBitLinear) and linear.rounds_inputs:
        coded = quantised.quantise_rows(x, terms=1)
        values = coded.codes[0].float() * coded.scales[:, None]
    y = values.double() @ linear.weight.dequantised().double().t()
    return y if linear.bias is None else y + linear.bias.double()


def error_of(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).abs().max() / reference.abs().max())


def captured(linear: QuantisedLinear, x: Tensor) -> Tensor:
    """Run the linear in a CUDA graph."""
    run = partial(linear, x)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    y.zero_()
    graph.replay()
    return y


def check(title: str, make: Callable[[str], QuantisedLinear]) -> Section:
    rows: Table = []
    for name in SHAPES:
        linear = make(name)
        row: dict[str, object] = {"linear": name}
        for num_rows in ROWS:
            x = torch.randn(num_rows, linear.in_features, device="cuda").bfloat16()
            x[:, 7] *= 40
            reference = expected(linear, x)
            sums = linear.partial_sums(x)
            total = sums.sum(dim=0) if sums.ndim == 3 else sums
            found = [linear(x), captured(linear, x), total]
            worst = max(error_of(y, reference) for y in found)
            assert worst < LIMIT, f"{title}, {name}, {num_rows} rows: {worst}"
            row[str(num_rows)] = worst
        rows.append(row)
    return Section(title=f"{title}: relative error by rows", rows=rows)


def main() -> None:
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__))
    torch.manual_seed(0)
    out = start_report("quantised-check", arguments, describe_machine("all", "cuda"))
    out.add(check("FP8, bias", partial(make_linear, rounds_inputs=True, has_bias=True)))
    out.add(check("FP8 weights", partial(make_linear, rounds_inputs=False, has_bias=False)))
    out.add(check("int4", make_four_bit))
    out.finish()


if __name__ == "__main__":
    main()
