"""The roofline of a decode step: the bytes that it must read and the FLOPs of its GEMMs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loramux.models.loader import LoadedModel

# Measured on one H200: a large copy, and a large bfloat16 GEMM.
H200_BYTES_PER_S = 4.3e12
H200_FLOPS = 790e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A step reads its weights or computes its GEMMs, whichever takes longer, and reads the KV."""

    weight_bytes: int
    """All weights but the embedding, of which a step reads one row per token."""
    num_weights: int
    kv_bytes_per_token: int
    bytes_per_s: float
    flops: float

    def step_s(self, batch: int, context: float) -> float:
        read_s = self.weight_bytes / self.bytes_per_s
        multiply_s = 2 * self.num_weights * batch / self.flops
        return (
            max(read_s, multiply_s) + batch * context * self.kv_bytes_per_token / self.bytes_per_s
        )

    def tokens_per_s(self, batch: int, context: float) -> float:
        return batch / self.step_s(batch, context)

    def note(self) -> str:
        return (
            f"Roofline: {self.weight_bytes / 1e9:.2f} GB of weights and "
            f"{self.kv_bytes_per_token / 1024:.0f} KiB of KV per token of context, at "
            f"{self.bytes_per_s / 1e12:.3g} TB/s; GEMMs at {self.flops / 1e12:.3g} TFLOP/s."
        )


def roofline_of(model: LoadedModel, *, bytes_per_s: float, flops: float) -> Roofline:
    config = model.config
    qkv = (config.q_size + 2 * config.kv_size) * config.hidden_size
    layer = qkv + config.q_size * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    num_weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    itemsize = model.decoder.dtype.itemsize
    return Roofline(
        weight_bytes=num_weights * itemsize,
        num_weights=num_weights,
        kv_bytes_per_token=config.num_layers * 2 * config.kv_size * itemsize,
        bytes_per_s=bytes_per_s,
        flops=flops,
    )


def measure_cpu(dtype: torch.dtype) -> tuple[float, float]:
    """Return the bytes per second of a GEMV and the FLOPs per second of a GEMM."""
    big = torch.ones(4096, 8192, dtype=dtype)
    vector = torch.ones(8192, dtype=dtype)
    square = torch.ones(768, 768, dtype=dtype)
    read_s = _best_of(lambda: torch.mv(big, vector))
    gemm_s = _best_of(lambda: torch.mm(square, square))
    return big.nbytes / read_s, 2 * 768**3 / gemm_s


def _best_of(work: Callable[[], object], count: int = 5) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
