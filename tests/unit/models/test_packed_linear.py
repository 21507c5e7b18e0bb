from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from loramux.kernels import select
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear
from loramux.models.loader import load_model
from loramux.models.packed_linear import PackedLinear, can_pack, pack_linears
from tests.model_factory import DenseAttention, save_hf_folder, tiny_transformers_model

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this torch has no oneDNN"
)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    folder = save_hf_folder(tiny_transformers_model("smollm2"), tmp_path)
    return load_model(folder, dtype=torch.float32).decoder


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(num_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    linear = Linear(96, 80, bias=bias, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    x = torch.randn(num_rows, 96, generator=generator)
    expected = F.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(PackedLinear(linear)(x), expected, atol=1e-5, rtol=1e-5)


def test_onednn_computes_the_gemm_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_jit_gemm", lambda dtype: False)
    linear = Linear(96, 80, bias=True, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 10)
    x = torch.randn(5, 96)
    packed = PackedLinear(linear)
    assert packed.matrix is None and packed.packed is not None
    expected = F.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(packed(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_compiled_gemm_is_used_for_more_than_one_token(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        pytest.importorskip("numba", reason="no numba on this machine")
    monkeypatch.setattr(select, "has_jit_gemm", lambda dtype: is_compiled)
    packed = PackedLinear(Linear(24, 40, bias=False, dtype=torch.float32))
    assert packed.matrix_for(1) is None
    assert packed.matrix_for(2) is packed.matrix and (packed.matrix is not None) == is_compiled


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="oneDNN has no bfloat16 here"
)
def test_in_bfloat16_a_single_row_is_computed_as_one_of_several() -> None:
    """Whole numbers whose sums bfloat16 holds: the plain weight would give the same."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(64, 80, bias=False, dtype=torch.bfloat16)
    linear.weight.copy_(torch.randint(-1, 2, linear.weight.shape, generator=generator))
    x = torch.randint(-1, 2, (32, 64), generator=generator).bfloat16()
    packed = PackedLinear(linear)
    expected = F.linear(x, linear.weight)
    linear.weight.zero_()
    for num_rows in (1, 2, 32):
        assert torch.equal(packed(x[:num_rows]), expected[:num_rows])


def test_rows_with_gaps_between_them_are_read_right() -> None:
    linear = Linear(8, 8, dtype=torch.float32)
    linear.weight.copy_(torch.eye(8))
    x = torch.arange(64.0).view(4, 16)[:, :8]
    assert torch.equal(PackedLinear(linear)(x), x)


def test_every_site_is_packed_and_the_model_computes_the_same(decoder: Decoder) -> None:
    tokens, positions = torch.arange(20), torch.arange(20)
    with torch.inference_mode():
        expected = decoder.logits(decoder(tokens, positions, DenseAttention()))
        num_bytes = pack_linears(decoder, byte_limit=1 << 30)
        actual = decoder.logits(decoder(tokens, positions, DenseAttention()))
    sites = [linear for _, linear in decoder.linears()]
    sites.append(decoder.lm_head)
    assert all(isinstance(site, PackedLinear) for site in sites)
    assert num_bytes == sum(site.weight.nbytes for site in sites)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_tied_head_still_reads_the_embedding(decoder: Decoder) -> None:
    pack_linears(decoder, byte_limit=1 << 30)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight


def test_no_more_than_the_limit_is_taken(decoder: Decoder) -> None:
    limit = decoder.layers[0].qkv.weight.nbytes + decoder.layers[0].o.weight.nbytes
    assert pack_linears(decoder, byte_limit=limit) == limit
    packed = [m for m in decoder.modules() if isinstance(m, PackedLinear)]
    assert packed == [decoder.layers[0].qkv, decoder.layers[0].o]


def test_packing_twice_takes_nothing_more(decoder: Decoder) -> None:
    pack_linears(decoder, byte_limit=1 << 30)
    assert pack_linears(decoder, byte_limit=1 << 30) == 0


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, "cuda"), (torch.float64, "cpu")], ids=str
)
def test_what_cannot_be_packed_is_left_alone(dtype: torch.dtype, device: str) -> None:
    assert not can_pack(dtype, torch.device(device))
