"""One decode step of a Llama-3.1-8B-shaped model in a CUDA graph, against the card's roofline.

Random weights; every kernel is first checked against its torch twin. Needs an NVIDIA GPU.

    python -m benchmarks.gpu_decode_step [--batches 1,32,128,256] [--context 512] [--layers 32]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_decode_checks import check_all
from benchmarks.gpu_timing import print_table, replay_times, time_by_kernel
from loramux.kernels.gpu import elementwise as fused
from loramux.kernels.gpu.attention import ops as attention
from loramux.kernels.gpu.sampling import choose_tokens
from loramux.kernels.ops import AttendArgs, KVTarget, Norm, PagedLayout, Rotation

HIDDEN, INNER, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
EPS, THETA = 1e-5, 500_000.0
READ_BYTES_PER_S = 4.3e12
"""Of a large copy on an H200; the roofline in the table's last columns is drawn with it."""
FLOPS = 790e12
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Norm
    mlp_norm: Norm


@dataclass(frozen=True, slots=True)
class Model:
    embedding: Tensor
    layers: list[Layer]
    norm: Norm
    head: Tensor
    frequencies: Tensor
    signs: Tensor

    @property
    def weight_bytes(self) -> int:
        """What a step reads: all but the embedding."""
        found = [self.head]
        for layer in self.layers:
            found += [layer.qkv, layer.o, layer.gate_up, layer.down]
        return sum(weight.nbytes for weight in found)


def make_model(num_layers: int) -> Model:
    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=DEVICE).mul_(0.02)

    def norm() -> Norm:
        return Norm(torch.rand(HIDDEN, dtype=DTYPE, device=DEVICE) + 0.5, EPS)

    layers = [
        Layer(
            qkv=weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            o=weight(HIDDEN, HEADS * HEAD_DIM),
            gate_up=weight(2 * INNER, HIDDEN),
            down=weight(HIDDEN, INNER),
            attention_norm=norm(),
            mlp_norm=norm(),
        )
        for _ in range(num_layers)
    ]
    half = THETA ** -(torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    signs = torch.ones(HEAD_DIM, device=DEVICE)
    signs[: HEAD_DIM // 2] = -1.0
    return Model(
        embedding=weight(VOCAB, HIDDEN),
        layers=layers,
        norm=norm(),
        head=weight(VOCAB, HIDDEN),
        frequencies=half.repeat(2),
        signs=signs,
    )


class DecodeStep:
    """All of a step's tensors, and the step: tokens in, tokens out, both on the device."""

    def __init__(self, model: Model, batch: int, context: int) -> None:
        self.model, self.batch, self.context = model, batch, context
        num_pages = batch * -(-(context + 64) // BLOCK)
        self.layout = PagedLayout(len(model.layers), KV_HEADS, HEAD_DIM, BLOCK)
        page = len(model.layers) * 2 * BLOCK * KV_HEADS * HEAD_DIM
        self.storage = torch.empty(num_pages, page, dtype=DTYPE, device=DEVICE).normal_()
        pages = torch.randperm(num_pages, device=DEVICE).int().view(batch, -1)
        q = torch.empty(batch, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        self.plan = attention.plan_decodes(pages, self.layout, q)
        self.num_tokens = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        self.tokens = torch.randint(VOCAB, (batch,), device=DEVICE)
        self.temperatures = torch.zeros(batch, device=DEVICE)
        self.noise = torch.rand(batch, dtype=torch.float64, device=DEVICE)

    @property
    def roofline_s(self) -> float:
        kv_bytes = self.batch * self.context * len(self.model.layers) * 2 * KV_HEADS * HEAD_DIM * 2
        weights = self.model.weight_bytes
        products = max(weights / READ_BYTES_PER_S, weights * self.batch / FLOPS)
        return products + kv_bytes / READ_BYTES_PER_S

    def reset(self) -> None:
        """So that 64 steps have `context` tokens on average."""
        self.num_tokens.fill_(self.context - 32)

    def run(self) -> None:
        model = self.model
        self.num_tokens.add_(1)
        self.plan.partition(self.num_tokens)
        rotation = Rotation(
            *fused.rotation(self.num_tokens - 1, model.frequencies, model.signs, 1.0)
        )
        hidden = F.embedding(self.tokens, model.embedding)
        normed = fused.add_norm(None, hidden, model.layers[0].attention_norm)
        following = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        for index, layer in enumerate(model.layers):
            qkv = F.linear(normed, layer.qkv)
            target = KVTarget(self.storage, self.plan.slots, self.layout, index)
            q = fused.rotate_write(qkv, rotation, target)
            args = AttendArgs(layer=index, scale=HEAD_DIM**-0.5)
            attended = self.plan.attend(self.storage, q, args)
            normed = fused.add_norm(F.linear(attended, layer.o), hidden, layer.mlp_norm)
            mixed = fused.activate_mul(F.linear(normed, layer.gate_up), "silu")
            normed = fused.add_norm(F.linear(mixed, layer.down), hidden, following[index])
        logits = F.linear(normed, model.head)
        self.tokens.copy_(choose_tokens(logits, self.temperatures, self.noise))


def measure(model: Model, batch: int, context: int) -> list[object]:
    step = DecodeStep(model, batch, context)
    step.reset()
    graph, seconds = replay_times(step.run, reset=step.reset, num_replays=64)
    print(f"\nbatch {batch}: kernels of one step")
    step.reset()
    time_by_kernel(graph.replay)
    roofline = step.roofline_s
    ms, share = f"{seconds * 1e3:.3f}", f"{roofline / seconds:.1%}"
    return [batch, ms, f"{batch / seconds:.0f}", f"{batch / roofline:.0f}", share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--skip-checks", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if not arguments.skip_checks:
        check_all()
    model = make_model(arguments.layers)
    batches = [int(part) for part in arguments.batches.split(",")]
    rows = [measure(model, batch, arguments.context) for batch in batches]
    print_table(["batch", "ms", "tok/s", "roofline", "share"], rows)


if __name__ == "__main__":
    main()
