from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.adapters.peft.config import decode_json, parse_config, read_config
from loramux.errors import AdapterRefused
from tests.adapter_factory import lora_config_dict, write_adapter


def refusal_of(**overrides: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as refused:
        parse_config(lora_config_dict(**overrides))
    return refused.value


def test_absent_fields_have_the_defaults_of_peft() -> None:
    config = parse_config({"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 8, False)
    assert config.rank_pattern == config.alpha_pattern == ()
    assert config.exclude_modules == config.layers_to_transform == config.layers_pattern == ()


def test_fields_are_read() -> None:
    config = parse_config(
        lora_config_dict(
            r=16,
            lora_alpha=0.5,
            use_rslora=True,
            rank_pattern={"b": 2, "a": 3},
            alpha_pattern={"q": 1.5},
            target_modules=["v_proj", "q_proj", "v_proj"],
            exclude_modules="x.*",
            layers_to_transform=[2, 0, 2],
            layers_pattern="layers",
        )
    )
    assert (config.r, config.lora_alpha, config.use_rslora) == (16, 0.5, True)
    assert config.rank_pattern == (("b", 2), ("a", 3))
    assert config.alpha_pattern == (("q", 1.5),)
    assert config.target_modules == ("q_proj", "v_proj")
    assert config.exclude_modules == "x.*"
    assert config.layers_to_transform == (0, 2)
    assert config.layers_pattern == ("layers",)


def test_one_layer_number_is_a_list_of_one() -> None:
    assert parse_config(lora_config_dict(layers_to_transform=0)).layers_to_transform == (0,)


def test_all_linear_may_be_written_in_any_case() -> None:
    assert (
        parse_config(lora_config_dict(target_modules="All-Linear")).target_modules == "all-linear"
    )


def test_every_unsupported_field_is_named() -> None:
    refusal = refusal_of(use_qalora=True, layer_replication=[[0, 2]])
    assert "use_qalora" in refusal.reason and "layer_replication" in refusal.reason


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_without_content_passes(value: object) -> None:
    parse_config(lora_config_dict(lora_twist=value))


@pytest.mark.parametrize("value", [0, True, "x", [0], {"a": None}])
def test_an_unknown_field_with_content_is_refused_by_its_name(value: object) -> None:
    refusal = refusal_of(lora_twist=value)
    assert refusal.code == "unknown_field"
    assert "lora_twist" in refusal.reason


@pytest.mark.parametrize("start", [None, True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_start_values_that_leave_the_base_alone_pass(start: object) -> None:
    parse_config(lora_config_dict(init_lora_weights=start))


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga"]
)
def test_start_values_taken_from_the_base_are_refused(start: str) -> None:
    assert refusal_of(init_lora_weights=start).code == "changes_base"


def test_settings_of_a_start_that_is_not_used_pass() -> None:
    unused = {"loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 1.0}, "corda_config": {}}
    parse_config(lora_config_dict(init_lora_weights=True, **unused))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", True),
        ("r", 4.0),
        ("lora_alpha", True),
        ("use_rslora", "true"),
        ("rank_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"q_proj": None}),
        ("target_modules", {"q_proj": 1}),
        ("exclude_modules", 3),
        ("layers_to_transform", True),
        ("layers_pattern", 1),
        ("base_model_name_or_path", 1),
        ("task_type", ["CAUSAL_LM"]),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_name(field: str, value: object) -> None:
    refusal = refusal_of(**{field: value})
    assert refusal.code == "wrong_type"
    assert field in refusal.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", -1),
        ("rank_pattern", {"q_proj": 0}),
        ("lora_alpha", 1e300),
        ("layers_to_transform", [-1]),
    ],
)
def test_an_impossible_value_is_refused(field: str, value: object) -> None:
    assert refusal_of(**{field: value}).code == "bad_value"


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"{", b"null", b"3", b'{"r": ' + b"9" * 5000 + b"}"]
)
def test_what_is_not_a_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(AdapterRefused) as refused:
        decode_json(text)
    assert refused.value.code == "config_not_json"


def test_the_file_is_found_in_the_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_config_dict(r=3), None)
    assert read_config(tmp_path).r == 3


def test_the_canonical_form_leaves_out_what_cannot_matter() -> None:
    plain = parse_config(lora_config_dict()).canonical()
    noisy = parse_config(
        lora_config_dict(
            base_model_name_or_path="other",
            task_type="SEQ_CLS",
            lora_dropout=0.1,
            target_modules=["v_proj", "q_proj"],
            layers_to_transform=[],
            layers_pattern=["layers"],
        )
    ).canonical()
    assert noisy == plain


def test_the_canonical_form_keeps_the_order_of_patterns() -> None:
    forward = parse_config(lora_config_dict(rank_pattern={"q_proj": 4, ".*proj": 8}))
    backward = parse_config(lora_config_dict(rank_pattern={".*proj": 8, "q_proj": 4}))
    assert forward.canonical() != backward.canonical()


def test_fields_of_parts_beside_low_rank_are_read() -> None:
    config = parse_config(
        lora_config_dict(
            use_dora=True,
            modules_to_save=["norm", "lm_head", "norm"],
            trainable_token_indices={"lm_head": [7, 3], "embed_tokens": []},
        )
    )
    assert config.use_dora and config.modules_to_save == ("lm_head", "norm")
    assert config.trainable_token_indices == (("lm_head", (7, 3)),)
    listed = parse_config(lora_config_dict(trainable_token_indices=[5]))
    assert listed.trainable_token_indices == (("embed_tokens", (5,)),)


def test_the_cid_covers_them_only_where_they_are_set() -> None:
    plain = parse_config(lora_config_dict()).canonical()
    blank = {"use_dora": False, "lora_bias": False, "bias": "none", "modules_to_save": []}
    assert parse_config(lora_config_dict(**blank)).canonical() == plain
    effects: list[dict[str, Any]] = [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
    ]
    for effect in effects:
        canonical = parse_config(lora_config_dict(**effect)).canonical()
        assert canonical.keys() - plain.keys() == effect.keys()
