from __future__ import annotations

import torch
from torch import nn

from loramux.kernels.ops import LoraSlice, LoraWeights, Segment
from loramux.kernels.reference import lora as lora_torch
from loramux.lora.attach import LoraLinear, attach
from loramux.lora.batch import LoraBatch
from loramux.models.architectures import parse_config
from loramux.models.decoder import Decoder
from tests.model_factory import tiny_config


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)


def test_only_the_named_site_of_the_right_layer_gets_the_adapter() -> None:
    layers = [Layer(), Layer()]
    x = torch.randn(3, 4)
    plain = [(layer.o(x), layer.down(x)) for layer in layers]
    context = attach(layers, ["o", "down"], lora_torch)
    weights = LoraWeights(torch.randn(1, 4, 2), (LoraSlice(torch.randn(1, 2, 4), 0, 0),))
    batch = LoraBatch([])
    batch.sites[1, "o"] = [(weights, lora_torch.cut_rows([Segment(0, 1, 2)], 1))]
    context.batch = batch
    with torch.inference_mode():
        changed = [(layer.o(x), layer.down(x)) for layer in layers]
    assert torch.equal(changed[0][0], plain[0][0]) and torch.equal(changed[1][1], plain[1][1])
    expected = plain[1][0] + 0
    expected[1] += (x[1] @ weights.a[0]) @ weights.slices[0].b[0]
    torch.testing.assert_close(changed[1][0], expected)


def test_without_a_batch_the_base_is_called_and_nothing_else() -> None:
    layer = Layer()
    x = torch.randn(3, 4)
    plain = layer.o(x)
    attach([layer], ["o"], lora_torch)
    assert isinstance(layer.o, LoraLinear) and torch.equal(layer.o(x), plain)


def test_merged_sites_stand_for_the_batch_and_untouched_sites_stay_the_base() -> None:
    layer = Layer()
    x, double = torch.randn(3, 4), nn.Linear(4, 4)
    plain = layer.down(x)
    context = attach([layer], ["o", "down"], lora_torch)
    weights = LoraWeights(torch.randn(1, 4, 2), (LoraSlice(torch.randn(1, 2, 4), 0, 0),))
    context.batch = LoraBatch([])
    context.batch.sites[0, "o"] = [(weights, lora_torch.cut_rows([Segment(0, 0, 3)], 1))]
    context.merged = {(0, "o"): double}
    with torch.inference_mode():
        assert torch.equal(layer.o(x), double(x)), "the adapter must not be added twice"
        assert torch.equal(layer.down(x), plain)
    assert list(context.bases) == [(0, "o"), (0, "down")]
    assert context.bases[0, "o"] is layer.o.base


def test_a_decoder_with_attached_adapters_tells_the_formats_of_its_weights() -> None:
    fields = {**tiny_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"]}
    decoder = Decoder(parse_config(fields), dtype=torch.float32, device="meta")
    names = [spec.name for spec, _ in decoder.linears()]
    attach(decoder.layers, dict.fromkeys(names), lora_torch)
    assert all(isinstance(linear, LoraLinear) for _, linear in decoder.linears())
    assert decoder.kept_formats == ()
