"""Compare every attention, elementwise, GEMM and sampling kernel with its torch reference on a GPU.

    python -m tests.gpu.kernel_check

Each check runs in bfloat16, float16 and float32, and in a process of its own, because most of the
time is spent compiling kernels. It needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.machine import describe_machine
from benchmarks.lib.report import Section, Table, parse_arguments, start_report
from benchmarks.lib.timing import capture
from loramux.kernels.gpu import elementwise, sampling
from loramux.kernels.gpu.attention import ops as attention
from loramux.kernels.gpu.attention import split_kv
from loramux.kernels.gpu.attention.split_kv import Partition
from loramux.kernels.gpu.gemm import small_m, swiglu
from loramux.kernels.gpu.lora.token_rows import WORDS, RowTerms, add_deltas
from loramux.kernels.ops import (
    ACTIVATIONS,
    AttendArgs,
    KVTarget,
    Norm,
    Rotation,
    SequenceRows,
)
from loramux.kernels.reference import attention as attention_reference
from loramux.kernels.reference import elementwise as elementwise_reference
from loramux.kernels.reference import sampling as sampling_reference
from loramux.kernels.reference import split_kv as split_kv_reference
from loramux.types.kv import KVLayout

DEVICE = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Largest |out - reference| / |reference|; the reference is computed in float64 where possible."""

MIXES = {
    "decodes": [(511, 1), (3, 1), (0, 1), (1500, 1), (64, 1), (63, 1)],
    "one long decode": [(9000, 1)],
    "prefill": [(0, 200), (0, 7), (100, 150)],
    "last chunk of a long prefill": [(5000, 40)],
    "mixed": [(700, 1), (0, 300), (33, 2), (250, 129), (17, 1)],
}
SHAPES = [(8, 4, 128), (2, 7, 64), (3, 3, 80), (1, 8, 256), (4, 1, 16)]
"""(KV heads, query heads per KV head, head dimension)"""


Errors = dict[tuple[str, torch.dtype], float]


def check_all() -> Errors:
    """Run all checks and return the largest error of each kernel and dtype."""
    jobs: list[tuple[Any, ...]] = [(check_items,), (check_sampling,)]
    for dtype in DTYPES:
        jobs += [(check_attention, dtype, shape) for shape in SHAPES]
        jobs += [(check_decode_graph, dtype, shape) for shape in SHAPES]
        jobs += [(check_elementwise, dtype), (check_gemm, dtype), (check_token_rows, dtype)]
    worst: Errors = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(*job) for job in jobs]:
            for key, error in future.result().items():
                worst[key] = max(worst.get(key, 0.0), error)
    return worst


def section_of(worst: Errors) -> Section:
    rows: Table = [
        {"kernel": name, **{str(d)[6:]: worst.get((name, d)) for d in DTYPES}}
        for name in sorted({name for name, _ in worst})
    ]
    return Section(title="Relative error to the torch reference", rows=rows)


def main() -> None:
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__))
    if not torch.cuda.is_available():
        raise SystemExit("The kernels are compared on an NVIDIA GPU, and there is none.")
    out = start_report("kernel-check", arguments, describe_machine("all", "cuda"))
    worst = check_all()
    out.add(section_of(worst))
    out.finish()
    wrong = [key for key, error in worst.items() if error > LIMITS[key[1]]]
    if wrong:
        raise SystemExit(f"beyond the limit: {wrong}")


def add(errors: Errors, name: str, actual: Tensor, expected: Tensor) -> None:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    key = (name, actual.dtype)
    errors[key] = max(errors.get(key, 0.0), error if error == error else math.inf)


def check_attention(dtype: torch.dtype, shape: tuple[int, int, int]) -> Errors:
    errors: Errors = {}
    kv_heads, group, dim = shape
    variants = {"attend": AttendArgs(layer=1, scale=0.09)}
    if shape in SHAPES[:2]:
        variants["attend, window"] = AttendArgs(layer=0, scale=0.09, sliding_window=100)
        variants["attend, softcap"] = AttendArgs(layer=1, scale=0.2, softcap=5.0)
    layout = KVLayout(2, kv_heads, dim, 16)
    for mix in MIXES.values():
        sequences, storage = make_sequences(mix, layout, dtype)
        num_rows = sum(rows for _, rows in mix)
        # Strided queries, as the decoder passes them.
        wide = torch.randn(num_rows, (group + 2) * kv_heads, dim, dtype=dtype, device=DEVICE)
        q, k, v = wide.split([group * kv_heads, kv_heads, kv_heads], dim=1)
        for name, args in variants.items():
            plan = attention.plan(sequences, layout, DEVICE)
            plan.write_kv(storage, args.layer, k, v)
            reference_storage, reference_plan = (
                storage.double(),
                attention_reference.plan(sequences, layout, DEVICE),
            )
            reference_plan.write_kv(reference_storage, args.layer, k.double(), v.double())
            assert torch.equal(reference_storage.to(dtype), storage)
            expected = reference_plan.attend(reference_storage, q.double(), args)
            # Twice, since the first run must reset the semaphores.
            for _ in range(2):
                add(errors, name, plan.attend(storage, q, args), expected)
    return errors


def check_decode_graph(dtype: torch.dtype, shape: tuple[int, int, int]) -> Errors:
    """Replay a CUDA graph twice, with other lengths the second time."""
    errors: Errors = {}
    kv_heads, group, dim = shape
    num_rotated = (group + 1) * kv_heads
    layout = KVLayout(2, kv_heads, dim, 16)
    lengths = [[1, 700, 0, 33, 4000, 16, 17], [2, 65, 1200, 0, 18, 64, 700]]
    batch, width = len(lengths[0]), 4000 // 16 + 1
    pages = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    page = layout.num_layers * 2 * layout.block_tokens * kv_heads * dim
    storage = torch.randn(batch * width, page, dtype=dtype, device=DEVICE)
    qkv = torch.randn(batch, (num_rotated + kv_heads) * dim, dtype=dtype, device=DEVICE)
    cos, sin = torch.randn(2, batch, dim // 2, device=DEVICE)
    cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    norm = Norm(torch.randn(num_rotated, dim, dtype=dtype, device=DEVICE), 1e-6)
    rotation = Rotation(cos, sin, norm if shape in SHAPES[1:3] else None)
    args = AttendArgs(layer=1, scale=0.09, sliding_window=300 if shape == SHAPES[1] else None)
    like = qkv.view(batch, -1, dim)[:, : group * kv_heads]
    plan = attention.plan_decodes(pages, layout, like, (args.sliding_window,))
    num_tokens = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    outs: list[Tensor] = []

    def work() -> None:
        plan.partition(num_tokens)
        target = KVTarget(storage, plan.slots, layout, 1)
        q = elementwise.rotate_write(qkv.clone(), rotation, target)
        outs.append(plan.attend(storage, q, args))

    graph = capture(work)
    for some in lengths:
        num_tokens.copy_(torch.tensor(some))
        reference_storage = storage.clone()
        graph.replay()
        slots = split_kv_reference.last_slots(num_tokens, pages, layout)
        target = KVTarget(reference_storage, slots, layout, 1)
        q = elementwise_reference.rotate_write(qkv.clone(), rotation, target)
        rows = [i for i, n in enumerate(some) if n]
        sequences = [SequenceRows(i, 1, some[i] - 1, pages[i].tolist()) for i in rows]
        reference_plan = attention_reference.plan(sequences, layout, DEVICE)
        expected = reference_plan.attend(reference_storage.double(), q.double(), args)
        add(errors, "decode graph", outs[-1][rows], expected[rows])
        add(errors, "decode graph, pages", storage, reference_storage)
    return errors


def make_sequences(
    mix: list[tuple[int, int]], layout: KVLayout, dtype: torch.dtype
) -> tuple[list[SequenceRows], Tensor]:
    needed = [-(-(start + rows) // layout.block_tokens) for start, rows in mix]
    order = torch.randperm(sum(needed) + 3).tolist()
    sequences, row = [], 0
    for (start, rows), num_pages in zip(mix, needed, strict=True):
        pages, order = order[:num_pages], order[num_pages:]
        sequences.append(SequenceRows(row, rows, start, pages))
        row += rows
    page = layout.num_layers * 2 * layout.block_tokens * layout.num_kv_heads * layout.head_dim
    return sequences, torch.randn(sum(needed) + 3, page, dtype=dtype, device=DEVICE)


def check_elementwise(dtype: torch.dtype) -> Errors:
    errors: Errors = {}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=DEVICE)

    for rows, hidden in ((1, 4096), (5, 2304), (33, 576)):
        for x, after in ((None, None), (random(rows, hidden), None), (random(rows, hidden),) * 2):
            weight, residual = random(hidden), random(rows, hidden)
            after_norm = None if after is None else Norm(after[0], 1e-6)
            outs = []
            for kernels in (elementwise, elementwise_reference):
                own = residual.clone()
                normed = kernels.add_norm(x, own, Norm(weight, 1e-5), after_norm)
                outs.append((normed, own))
            add(errors, "add_norm", outs[0][0], outs[1][0])
            add(errors, "add_norm, residual", outs[0][1], outs[1][1])
        for activation in ACTIVATIONS:
            gate_up = random(rows, 2 * hidden)
            expected = elementwise_reference.activate_mul(gate_up, activation)
            add(errors, activation, elementwise.activate_mul(gate_up, activation), expected)
    for kv_heads, group, dim in SHAPES:
        check_rotate_write(errors, KVLayout(3, kv_heads, dim, 16), group, dtype)
    return errors


def check_gemm(dtype: torch.dtype) -> Errors:
    errors: Errors = {}
    for outputs, inputs in ((6144, 4096), (576, 1536), (1000, 720)):
        weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
        for rows in (1, 2, 3, 16, 24, small_m.MAX_ROWS):
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            y = x.new_empty(rows, outputs)
            small_m.gemm(x, weight, y)
            add(errors, "small-M GEMM", y, x.double() @ weight.double().t())
        for rows in (33, 64, 65, 128):
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            if swiglu.supports(x, weight):
                for activation in ACTIVATIONS:
                    expected = elementwise_reference.linear_swiglu(x, weight, activation)
                    found = swiglu.linear_swiglu(x, weight, activation)
                    add(errors, f"SwiGLU GEMM, {activation}", found, expected)
    return errors


def check_token_rows(dtype: torch.dtype) -> Errors:
    """Rows of an image model: the base, single adapters, a sum; odd and large ranks and widths."""
    errors: Errors = {}
    g = torch.Generator(DEVICE).manual_seed(5)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=g) * scale).to(dtype)

    for num_tokens, wide, out in (
        (1, 768, 3072),
        (77, 2048, 640),
        (1536, 3072, 3072),
        (300, 70, 90),
    ):
        pairs = [
            (random(r, wide, scale=wide**-0.5), random(out, r, scale=r**-0.5)) for r in (16, 3, 130)
        ]
        rows: list[list[tuple[int, float]]] = [[], [(0, 1.0)], [(2, -0.7)], [(1, 0.5), (2, 1.25)]]
        places = torch.zeros(len(rows), 2, WORDS, dtype=torch.int64)
        weights = torch.zeros(len(rows), 2)
        bias = random(out)
        x, y = random(len(rows), num_tokens + 5, wide)[:, 5:], random(len(rows), num_tokens, out)
        expected = y.double()
        for row, terms in enumerate(rows):
            for term, (number, weight) in enumerate(terms):
                a, b = pairs[number]
                # The second adapter has a bias, too.
                address = bias.data_ptr() if number == 1 else 0
                places[row, term] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a), address])
                weights[row, term] = weight
                expected[row] += weight * (x[row].double() @ a.double().T) @ b.double().T
                expected[row] += weight * bias.double() * (number == 1)
        table = RowTerms(places.to(DEVICE), weights.to(DEVICE), 130, is_aligned=False)
        add_deltas(x, y, table)
        add(errors, "token rows", y, expected)
    return errors


def check_rotate_write(errors: Errors, layout: KVLayout, group: int, dtype: torch.dtype) -> None:
    rows, dim = 6, layout.head_dim
    num_rotated = (group + 1) * layout.num_kv_heads
    slots = torch.tensor([5, 17, -1, 90, 64, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 1, 2, 100, 4095, 131_000], dtype=torch.int32, device=DEVICE)
    frequencies = 500_000.0 ** -(torch.arange(dim, device=DEVICE) % (dim // 2) * 2 / dim)
    signs = torch.where(torch.arange(dim, device=DEVICE) < dim // 2, -1.0, 1.0)
    cos, sin = elementwise.rotation(positions, frequencies, signs)
    expected = elementwise_reference.rotation(positions, frequencies, signs)
    add(errors, "rotation", torch.cat((cos, sin)), torch.cat(expected))
    weight = torch.randn(num_rotated, dim, dtype=dtype, device=DEVICE)
    width = (num_rotated + layout.num_kv_heads) * dim
    for head_norm in (None, Norm(weight, 1e-6)):
        qkv = torch.randn(rows, width, dtype=dtype, device=DEVICE)
        storage = torch.randn(6, 3 * 2 * 16 * layout.num_kv_heads * dim, dtype=dtype, device=DEVICE)
        outs = []
        for kernels in (elementwise, elementwise_reference):
            target = KVTarget(storage.clone(), slots, layout, 1)
            q = kernels.rotate_write(qkv.clone(), Rotation(cos, sin, head_norm), target)
            outs.append((q, target.storage))
        add(errors, "rotate_write, q", outs[0][0], outs[1][0])
        add(errors, "rotate_write, pages", outs[0][1], outs[1][1])


def check_items() -> Errors:
    for window in (None, 100):
        lengths = [0, 1, 64, 65, 700, 0, 20_000]
        partition = Partition(rows=1, tile_tokens=64, target_splits=33, window=window)
        num_tokens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        actual = split_kv.partition_decodes(num_tokens, partition)
        assert torch.equal(actual, split_kv_reference.partition_decodes(num_tokens, partition))
    return {}


def check_sampling() -> Errors:
    rows, vocab = 256, 128_256
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    temperatures = torch.rand(rows, device=DEVICE) * (torch.rand(rows, device=DEVICE) > 0.3)
    noise = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    actual = sampling.choose_tokens(logits, temperatures, noise)
    expected = sampling_reference.choose_tokens(logits, temperatures, noise)
    print(f"sampled tokens unlike the reference: {int((actual != expected).sum())} of {rows}")
    assert int((actual != expected).sum()) <= 1
    return {}


if __name__ == "__main__":
    main()
