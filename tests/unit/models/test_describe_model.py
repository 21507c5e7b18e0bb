"""Shapes described from a config equal those of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loramux.errors import UnsupportedModel
from loramux.models.architectures import base_info, parse_config
from loramux.models.decoder import Decoder
from loramux.models.default_model import default_model_path
from loramux.models.folder import describe_model
from loramux.types.kv import KVLayout
from tests.model_factory import FAMILIES, MODEL_CLASSES, tiny_config


def config_dict(family: str) -> dict[str, object]:
    config = tiny_config(family)
    return {**config.to_dict(), "architectures": [MODEL_CLASSES[type(config).__name__]]}


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_equal_those_of_the_decoder(family: str) -> None:
    config = parse_config(config_dict(family))
    info = base_info(config, "tiny")
    decoder = Decoder(config, dtype=torch.float32, device="meta")
    assert info.num_parameters == sum(p.numel() for p in decoder.parameters())
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 4, "bfloat16")
    assert info.kv_layout(4, "bfloat16") == layout
    assert 4 * layout.token_bytes == layout.page_bytes
    qkv = next(linear for linear in info.linears if linear.name == "qkv")
    assert sum(qkv.out_features) == config.q_size + 2 * config.kv_size


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "my-model" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config_dict("qwen3")))
    assert describe_model(file) == describe_model(file.parent)
    assert describe_model(file).name == "my-model"


@pytest.mark.slow
def test_a_gguf_file_has_the_shapes_of_its_converted_folder(smollm2_folder: Path) -> None:
    told, made = describe_model(default_model_path()), describe_model(smollm2_folder)
    assert (told.projections, told.num_layers) == (made.projections, made.num_layers)
    assert told.num_parameters == made.num_parameters == 134_515_008
    assert "SmolLM2" in told.name


def test_missing_files_are_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="does not exist: give a"):
        describe_model(tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match="has no config.json"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UnsupportedModel, match="not a JSON object"):
        describe_model(tmp_path / "config.json")
