"""Compare linears over quantised weights with products of their dequantised weights on a GPU.

    python -m tests.gpu.quantised_check

Errors are relative to the largest output. Inputs that are rounded to FP8 are compared with the
product of the rounded inputs.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from loramux.kernels.gpu.gemm import quantised
from loramux.models.eight_bit_linear import EightBitLinear
from loramux.types.model import LinearSpec

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


def expected(linear: EightBitLinear, x: Tensor) -> Tensor:
    values = x.float()
    if linear.rounds_inputs:
        coded = quantised.quantise_rows(x, terms=1)
        values = coded.codes[0].float() * coded.scales[:, None]
    y = values.double() @ linear.weight.dequantised().double().t()
    return y if linear.bias is None else y + linear.bias.double()


def error_of(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).abs().max() / reference.abs().max())


def captured(linear: EightBitLinear, x: Tensor) -> Tensor:
    """Run the linear in a CUDA graph."""
    run = partial(linear, x)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    y.zero_()
    graph.replay()
    return y


def check(*, rounds_inputs: bool, has_bias: bool) -> Section:
    rows: Table = []
    for name in SHAPES:
        linear = make_linear(name, rounds_inputs=rounds_inputs, has_bias=has_bias)
        row: dict[str, object] = {"linear": name}
        for num_rows in ROWS:
            x = torch.randn(num_rows, linear.in_features, device="cuda").bfloat16()
            x[:, 7] *= 40
            reference = expected(linear, x)
            sums = linear.partial_sums(x)
            total = sums.sum(dim=0) if sums.ndim == 3 else sums
            found = [linear(x), captured(linear, x), total]
            worst = max(error_of(y, reference) for y in found)
            assert worst < LIMIT, f"{name}, {num_rows} rows: {worst}"
            row[str(num_rows)] = worst
        rows.append(row)
    kind = "inputs rounded to FP8" if rounds_inputs else "weight-only"
    title = f"FP8, {kind}{', bias' if has_bias else ''}: relative error by rows"
    return Section(title=title, rows=rows)


def main() -> None:
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__))
    torch.manual_seed(0)
    out = start_report("quantised-check", arguments, describe_machine("all", "cuda"))
    for rounds_inputs in (True, False):
        out.add(check(rounds_inputs=rounds_inputs, has_bias=rounds_inputs))
    out.finish()


if __name__ == "__main__":
    main()
