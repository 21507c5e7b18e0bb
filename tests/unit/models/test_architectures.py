from __future__ import annotations

from typing import Any

import pytest

from loramux.errors import UnsupportedModel
from loramux.models.architectures import ARCHITECTURES, base_info, parse_config
from tests.model_factory import FAMILIES, MODEL_CLASSES, tiny_config, tiny_transformers_model


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    written = tiny_config(family).to_dict()
    return {**written, "architectures": [MODEL_CLASSES[FAMILIES[family][0]]], **changes}


def test_unknown_architecture_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM") as refusal:
        parse_config(hf_config("llama", architectures=["FalconForCausalLM"]))
    assert all(name in str(refusal.value) for name in ARCHITECTURES)


def test_config_without_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="none in config.json"):
        parse_config(hf_config("llama", architectures=None))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised as aqlm"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "divide evenly"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        parse_config(hf_config("llama", **changes))


def test_layer_types_that_transformers_would_ignore_are_refused() -> None:
    mixed = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="layer_types"):
        parse_config(hf_config("mistral", layer_types=mixed))


def test_absent_keys_take_the_defaults_of_the_family() -> None:
    written = hf_config("gemma2")
    for key in ("tie_word_embeddings", "attn_logit_softcapping", "layer_types", "head_dim"):
        written.pop(key, None)
    config = parse_config(written)
    assert config.tie_embeddings
    assert config.attn_logit_softcap == 50.0
    assert config.head_dim == 256
    assert config.sliding_windows == (8, None, 8)


def test_window_that_is_switched_off_is_not_applied() -> None:
    config = parse_config(hf_config("qwen2", use_sliding_window=False, layer_types=None))
    assert config.sliding_windows == (None, None, None)


def test_null_window_means_no_window() -> None:
    assert parse_config(hf_config("mistral", sliding_window=None)).sliding_windows == (None,) * 3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_targets_are_the_linear_layers_of_the_checkpoint(family: str) -> None:
    model = tiny_transformers_model(family)
    shapes = {
        name.removesuffix(".weight"): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.endswith("_proj.weight")
    }
    targets = base_info(parse_config(hf_config(family)), "tiny").targets
    assert {t.path: (t.out_features, t.in_features) for t in targets} == shapes
    assert [t.path for t in targets] == list(shapes)
    assert all(t.path.split(".")[2] == str(t.layer) for t in targets)
    assert all(t.path.endswith(t.projection) for t in targets)


def test_base_info_names_the_base() -> None:
    info = base_info(parse_config(hf_config("llama")), "tiny")
    assert (info.name, info.architecture, info.num_layers) == ("tiny", "LlamaForCausalLM", 2)
    assert len(info.targets) == 2 * 7
