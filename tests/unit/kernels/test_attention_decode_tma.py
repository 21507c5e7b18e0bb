"""Decode attention by copied tiles: as the reference, whatever lies behind a sequence's tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

import triton.language as tl  # noqa: E402

from loramux.kernels.gpu.attention import ops as attention_triton
from loramux.kernels.gpu.attention.decode_tma import _load_queries  # noqa: E402
from loramux.kernels.ops import AttendArgs, SequenceRows  # noqa: E402
from loramux.kernels.reference import attention as attention_torch
from loramux.types.kv import KVLayout  # noqa: E402
from tests.unit.kernels.conftest import output_of_compiler  # noqa: E402

DEVICE = torch.device(os.environ.get("LORAMUX_TEST_DEVICE", "cpu"))
LENGTHS = [1, 16, 0, 17, 47, 64, 90, 400]
WIDTH = 25
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
PLAIN = AttendArgs(layer=1, scale=0.1)


def make_layout(num_kv_heads: int = 2, head_dim: int = 64) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_tokens=16)


def make_storage(layout: KVLayout, dtype: torch.dtype) -> Tensor:
    elements = 2 * layout.num_layers * 16 * layout.num_kv_heads * layout.head_dim
    return torch.randn(len(LENGTHS) * WIDTH, elements).to(dtype)


def decode(storage: Tensor, layout: KVLayout, q: Tensor, args: AttendArgs) -> tuple[Tensor, Tensor]:
    """Return what is found, and what the reference has, for the sequences that have tokens."""
    pages = torch.randperm(len(LENGTHS) * WIDTH).int().view(-1, WIDTH)
    tokens = storage.view(-1, 2, 2, 16, layout.num_kv_heads, layout.head_dim)
    # What no token was written to may hold anything.
    for length, own in zip(LENGTHS, pages.tolist(), strict=True):
        for place, page in enumerate(own):
            tokens[page, :, :, min(max(length - place * 16, 0), 16) :] = torch.nan
    plan = attention_triton.plan_decodes(pages, layout, q)
    (work,) = plan.work[None]
    assert attention_triton._uses_tma(plan, work, q, storage)
    plan.partition(torch.tensor(LENGTHS, dtype=torch.int32))
    assert work.items[:, 6].max() > 1, "no span was partition"
    found = plan.attend(storage, q, args)
    assert work.semaphores.count_nonzero() == 0
    sequences = [
        SequenceRows(i, 1, length - 1, own)
        for i, (length, own) in enumerate(zip(LENGTHS, pages.tolist(), strict=True))
        if length
    ]
    reference = attention_torch.plan(sequences, layout, DEVICE)
    wanted = reference.attend(storage.nan_to_num(0.0).float(), q.float(), args)
    rows = [i for i, length in enumerate(LENGTHS) if length]
    return found[rows].float(), wanted[rows]


@pytest.fixture(autouse=True)
def are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "_TMA_CTAS_PER_SM", 0)


@triton.jit
def _read_queries(q, out, count, HEAD_DIM: tl.constexpr):
    at = tl.arange(0, HEAD_DIM)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + at, _load_queries(q, count, HEAD_DIM))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("count", [1, 4, 7, 8])
def test_queries_are_columns_with_zeros_behind(count: int, head_dim: int) -> None:
    q = torch.randn(count, head_dim)
    out = torch.full((head_dim, 8), torch.nan)
    _read_queries[(1,)](q, out, count, head_dim)
    assert torch.equal(out[:, :count], q.T)
    assert not out[:, count:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("args", [PLAIN, AttendArgs(layer=0, scale=0.1, softcap=5.0)])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (1, 64), (3, 64), (8, 64)])
def test_it_equals_the_reference(
    group: int, head_dim: int, args: AttendArgs, dtype: torch.dtype
) -> None:
    layout = make_layout(head_dim=head_dim)
    storage = make_storage(layout, dtype)
    q = torch.randn(len(LENGTHS), 2 * group, head_dim).to(dtype)
    found, wanted = decode(storage, layout, q, args)
    room = 2e-3 if dtype == torch.float16 else 2e-2
    torch.testing.assert_close(found, wanted, atol=room, rtol=room)


@pytest.mark.parametrize("growth", [0.0, 0.1, 2.0, -2.0])
def test_scores_may_grow_and_shrink_along_a_sequence(growth: float) -> None:
    """By less than what is scaled late, and by more."""
    layout = make_layout(1)
    storage = make_storage(layout, torch.float16)
    number = torch.arange(len(storage)) % 32
    keys = storage.view(-1, 2, 2, 16, 64)[:, :, 0]
    keys += (growth * number)[:, None, None, None].half()
    q = torch.randn(len(LENGTHS), 4, 64).abs().half()
    found, wanted = decode(storage, layout, q, PLAIN)
    torch.testing.assert_close(found, wanted, atol=4e-3, rtol=4e-3)


def test_other_steps_keep_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case differs from one that has tiles copied in one thing."""
    pages = torch.zeros(4, WIDTH, dtype=torch.int32)

    def copies(
        layout: KVLayout,
        num_heads: int = 8,
        dtype: torch.dtype = torch.float16,
        window: int | None = None,
        kv_dtype: torch.dtype | None = None,
        padding: int = 0,
    ) -> bool:
        q = torch.zeros(4, num_heads, layout.head_dim, dtype=dtype)
        plan = attention_triton.plan_decodes(pages, layout, q, (window,))
        (work,) = plan.work[window]
        storage = torch.zeros(4, layout.num_elements + padding, dtype=kv_dtype or dtype)
        return attention_triton._uses_tma(plan, work, q, storage)

    assert copies(make_layout())
    assert not copies(make_layout(), dtype=torch.float32)
    assert not copies(make_layout(), kv_dtype=torch.bfloat16), "the copy converts nothing"
    assert not copies(make_layout(), padding=64)
    assert not copies(make_layout(), num_heads=18)
    assert not copies(make_layout(head_dim=96))
    assert not copies(KVLayout(2, 2, 64, 32))
    assert not copies(make_layout(), window=20)
    monkeypatch.setattr(attention_triton, "_TMA_CTAS_PER_SM", 1)
    assert not copies(make_layout())
    monkeypatch.setattr(attention_triton, "num_sms", lambda _: 7)
    assert copies(make_layout())
    monkeypatch.setattr(attention_triton, "supports_tma", lambda _: False)
    assert not copies(make_layout())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.kernels.gpu.attention.decode_tma import attend_decodes

known = {
    "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "HAS_SOFTCAP": False, "ROWS": 16, "REDUCED": 2048,
    "PDL": True,
}
types = {"tiles": "tensordesc<bf16[1,16,128]>", "scale": "fp32", "softcap": "fp32"}
types |= dict.fromkeys(("q_ptr", "out_ptr"), "*bf16")
types |= dict.fromkeys(("partial_ptr", "log_sum_ptr"), "*fp32")
types |= dict.fromkeys(("items_ptr", "page_table_ptr", "semaphores_ptr"), "*i32")
names = attend_decodes.arg_names
signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in names}
source = ASTSource(attend_decodes, signature, known)
options = {"num_warps": 1, "num_stages": 3}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(made.asm["ptx"].count("mma.sync"), made.metadata.shared)
"""


@pytest.mark.slow
def test_it_is_frugal_as_compiled(tmp_path: Path) -> None:
    """Sixteen products for sixteen tokens, and room for one tile: sixteen programs fit."""
    num_mmas, num_bytes = map(int, output_of_compiler(COMPILE, tmp_path).split())
    assert num_mmas == 16
    assert num_bytes < 2 * 2 * 16 * 128 * 2
