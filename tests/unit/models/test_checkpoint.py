from __future__ import annotations

from typing import Any

import pytest
import torch

from loramux.errors import UnsupportedModel
from loramux.models.architectures import parse_config
from loramux.models.checkpoint import checkpoint_slots
from loramux.models.decoder import Decoder
from loramux.models.slots import TensorSlot
from tests.model_factory import FAMILIES, MODEL_CLASSES, tiny_config, tiny_transformers_model


def empty_decoder(family: str) -> Decoder:
    written: dict[str, Any] = tiny_config(family).to_dict()
    written["architectures"] = [MODEL_CLASSES[FAMILIES[family][0]]]
    return Decoder(parse_config(written), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_are_exactly_the_tensors_of_transformers(family: str) -> None:
    expected = {
        name: tuple(parameter.shape)
        for name, parameter in tiny_transformers_model(family).named_parameters()
    }
    slots = checkpoint_slots(empty_decoder(family))
    assert {name: slot.shape for name, slot in slots.items()} == expected


@pytest.mark.parametrize("family", ["llama31", "gemma3", "qwen2"])
def test_slots_cover_every_element_once(family: str) -> None:
    """An element that no tensor fills would stay as memory was."""
    decoder = empty_decoder(family)
    for parameter in decoder.parameters():
        parameter.zero_()
    for slot in checkpoint_slots(decoder).values():
        slot.target.add_(1.0)
    assert all(bool((parameter == 1.0).all()) for parameter in decoder.parameters())


def test_wrong_shape_is_refused_with_both_shapes() -> None:
    slot = TensorSlot(torch.zeros(2, 3), (2, 3))
    with pytest.raises(UnsupportedModel, match=r"x has shape \[3, 2\].*\[2, 3\]"):
        slot.fill("x", torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantized_tensors_are_refused_not_cast(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match=f"x is stored as {dtype}"):
        TensorSlot(torch.zeros(2), (2,)).fill("x", torch.zeros(2).to(dtype))


def test_one_tensor_can_fill_many_rows_plus_one() -> None:
    target = torch.zeros(3, 2)
    TensorSlot(target, (2,), plus=1.0).fill("norm", torch.tensor([0.5, -0.5]))
    assert target.tolist() == [[1.5, 0.5]] * 3
