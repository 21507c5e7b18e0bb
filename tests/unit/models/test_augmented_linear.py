from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loramux.models.architectures import linears_of, parse_config
from loramux.models.augmented_linear import AugmentedLinear, appended_rows, augment_linears
from loramux.models.decoder import Decoder
from loramux.models.layers import Linear

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def make_decoder() -> Decoder:
    decoder = Decoder(parse_config(CONFIG), dtype=torch.float32)
    for parameter in decoder.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    return decoder


@pytest.mark.parametrize("has_bias", [False, True])
def test_appended_rows_do_not_change_the_outputs(has_bias: bool) -> None:
    plain = Linear(8, 6, bias=has_bias, dtype=torch.float32)
    for parameter in plain.parameters():
        parameter.data.normal_()
    linear = AugmentedLinear(plain, 32)
    linear.appended.normal_()
    x = torch.randn(3, 8)
    assert torch.equal(linear(x), plain(x))
    for num_rows in (32, 16):
        y = F.linear(x, *linear.augmented(num_rows))
        torch.testing.assert_close(y[:, :6], plain(x))
        torch.testing.assert_close(y[:, 6:], x @ linear.appended[:num_rows].t())


def test_every_fused_linear_gets_rank_blocks_per_projection() -> None:
    decoder = make_decoder()
    assert appended_rows(decoder) is None
    before = [parameter.clone() for parameter in decoder.parameters()]
    augment_linears(decoder, 2)
    appended = appended_rows(decoder)
    assert appended is not None and len(appended) == 2
    assert [tuple(rows.shape[:3]) for rows in appended[0]] == [
        (2, len(site.projections), 16) for site in linears_of(decoder.config)
    ]
    assert [rows.shape[3] for rows in appended[0]] == [32, 32, 32, 48]
    assert not any(rows.any() for of_layer in appended for rows in of_layer)
    for old, new in zip(before, decoder.parameters(), strict=True):
        assert torch.equal(old, new)


def test_augmenting_again_keeps_rows_of_the_same_size() -> None:
    decoder = make_decoder()
    augment_linears(decoder, 1)
    first = decoder.layers[0].qkv
    augment_linears(decoder, 1)
    assert decoder.layers[0].qkv is first
    augment_linears(decoder, 2)
    appended = appended_rows(decoder)
    assert appended is not None and appended[0][0].shape[0] == 2


def test_writing_appended_rows_changes_no_weight() -> None:
    decoder = make_decoder()
    augment_linears(decoder, 1)
    linear = decoder.layers[1].down
    weight = linear.weight.clone()
    appended = appended_rows(decoder)
    assert appended is not None
    appended[1][3].fill_(5.0)
    assert torch.equal(linear.weight, weight) and bool((linear.appended == 5.0).all())


def test_weights_and_biases_may_be_read_after_the_rows_were_appended() -> None:
    linear = AugmentedLinear(Linear(8, 6, bias=True, dtype=torch.float32), 32)
    assert linear.bias is not None
    with torch.no_grad():
        linear.weight.copy_(torch.randn(6, 8))
        linear.bias.copy_(torch.randn(6))
    x = torch.randn(3, 8)
    y = F.linear(x, *linear.augmented(16))
    torch.testing.assert_close(y[:, :6], F.linear(x, linear.weight, linear.bias))
    torch.testing.assert_close(y[:, 6:], torch.zeros(3, 16))
