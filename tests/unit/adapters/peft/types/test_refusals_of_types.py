"""What the served PEFT types refuse, and the types that are not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from loramux.adapters.peft.types.configs import PARSERS, parse_adapter_config
from loramux.adapters.peft.types.registry import RULES
from loramux.adapters.peft.types.unserved import UNSERVED
from loramux.errors import AdapterRefused
from tests.adapter_factory import (
    BASE_NAME,
    tiny_base_info,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)
from tests.peft_types_factory import read_parts

CONFIG = tiny_llama_config(num_hidden_layers=2)
MODEL = tiny_llama(CONFIG)
BASE = tiny_base_info(CONFIG)
DOCS = Path(__file__).parents[5] / "docs" / "adapters-kinds.md"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

MINIMAL: dict[str, dict[str, Any]] = {
    "IA3": {"feedforward_modules": []},
    "OFT": {"oft_block_size": 8, "peft_version": "0.21.0"},
}


def config_of(peft_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "peft_type": peft_type,
        "base_model_name_or_path": BASE_NAME,
        "target_modules": ["q_proj"],
        **MINIMAL.get(peft_type, {}),
        **fields,
    }


def refusal_of(peft_type: str, **fields: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as refused:
        parse_adapter_config(config_of(peft_type, **fields))
    return refused.value


@pytest.mark.parametrize("name", [member.name for member in PeftType])
def test_every_type_of_peft_is_served_or_refused_by_name(name: str) -> None:
    assert (name in PARSERS) + (name in UNSERVED) + (name == "LORA") == 1
    if name in UNSERVED:
        refusal = refusal_of(name)
        assert refusal.code == "not_lora" and f"peft_type is {name}, which" in refusal.reason
    else:
        assert parse_adapter_config(config_of(name)).canonical()["peft_type"] == name


def test_the_docs_have_a_row_for_every_type() -> None:
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in DOCS.read_text().split("## PEFT types")[1].splitlines()
        if len(cells := line.split("|")) > 3
    }
    assert {name for name, how in rows.items() if how == "served"} == {*PARSERS, "LORA"}
    assert {name for name, how in rows.items() if how == "refused"} == set(UNSERVED)


def test_every_parsed_type_has_a_rule() -> None:
    parsed = {parser.config for parser in PARSERS.values()}
    assert {config.peft_type for config in parsed - RULES.keys()} == {"LN_TUNING"}


@pytest.mark.parametrize("name", PARSERS)
def test_every_field_that_peft_saves_is_known(name: str) -> None:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[name]](
        **({"total_step": 5} if name == "ADALORA" else {})
    )
    fields = config.to_dict() | config_of(name)
    parse_adapter_config(json.loads(json.dumps(fields, default=list)))
    with pytest.raises(AdapterRefused, match="unknown meaning: twist"):
        parse_adapter_config({**fields, "twist": 3})


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "fields",
    [{"modules_to_save": ["lm_head"]}, {"bias": "all"}],
    ids=lambda field: next(iter(field)),
)
def test_changes_of_the_base_are_refused(name: str, fields: dict[str, Any]) -> None:
    refusal = refusal_of(name, **fields)
    assert refusal.code == "unsupported_field" and next(iter(fields)) in refusal.reason


@pytest.mark.parametrize(
    ("name", "fields", "code", "word"),
    [
        ("VERA", {"save_projection": False}, "unsupported_field", "save_projection"),
        ("VERA", {"exclude_modules": ["q_proj"]}, "unknown_field", "exclude_modules"),
        ("IA3", {"feedforward_modules": None}, "no_targets", "feedforward_modules"),
        ("IA3", {"layers_to_transform": [0]}, "unknown_field", "layers_to_transform"),
        ("OFT", {"r": 4}, "bad_value", "oft_block_size"),
        ("OFT", {"peft_version": "0.17.1"}, "unsupported_field", "use_cayley_neumann"),
        ("OFT", {"peft_version": None}, "unsupported_field", "use_cayley_neumann"),
        ("OFT", {"num_cayley_neumann_terms": 2**30}, "bad_value", "terms"),
        ("BOFT", {"boft_n_butterfly_factor": 2}, "unsupported_field", "butterfly"),
        ("MISS", {"init_weights": "max"}, "bad_value", "init_weights"),
        ("LOHA", {"r": 0}, "bad_value", "r must"),
        ("LOHA", {"target_modules": None}, "no_targets", "target_modules"),
        ("LOKR", {"decompose_factor": 1.5}, "wrong_type", "decompose_factor"),
        ("LN_TUNING", {"target_modules": "all-linear"}, "bad_value", "target_modules"),
        ("ADALORA", {"use_dora": True}, "unknown_field", "use_dora"),
        ("ADALORA", {"rank_pattern": {"q_proj": 4}}, "wrong_type", "rank_pattern"),
    ],
)
def test_fields_that_cannot_be_honoured(
    name: str, fields: dict[str, Any], code: str, word: str
) -> None:
    refusal = refusal_of(name, **fields)
    assert refusal.code == code and word in refusal.reason


def test_an_old_oft_has_another_meaning() -> None:
    fields = config_of("OFT")
    del fields["oft_block_size"]
    with pytest.raises(AdapterRefused, match="before 0.14"):
        parse_adapter_config(fields)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("LOHA", {"alpha": 9}),
        ("LOKR", {"decompose_factor": 4}),
        ("LOKR", {"decompose_both": True}),
        ("IA3", {"feedforward_modules": ["q_proj"]}),
        ("OFT", {"num_cayley_neumann_terms": 6}),
        ("OFT", {"coft": True}),
        ("OFT", {"block_share": True}),
        ("HRA", {"apply_GS": True}),
        ("MISS", {"init_weights": "bat"}),
        ("ADALORA", {"init_r": 9}),
        ("LN_TUNING", {"exclude_modules": ["norm"]}),
    ],
)
def test_what_changes_the_result_is_in_the_canonical_config(
    name: str, changed: dict[str, Any]
) -> None:
    plain = parse_adapter_config(config_of(name)).canonical()
    assert parse_adapter_config(config_of(name, **changed)).canonical() != plain
    noisy = config_of(name, inference_mode=True, revision="main", base_model_name_or_path="other")
    assert parse_adapter_config(noisy).canonical() == plain
    json.dumps(plain)


def loha_tensors(r: int = 2, layers: int = 2, width: int = 48) -> dict[str, torch.Tensor]:
    shapes = {"w1_a": (width, r), "w1_b": (r, 32), "w2_a": (width, r), "w2_b": (r, 32)}
    return {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.hada_{part}": torch.ones(shape)
        for layer in range(layers)
        for part, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: {}, "no_tensors"),
        (lambda t: loha_tensors(r=3), "wrong_shape"),
        (lambda t: loha_tensors(width=40), "wrong_shape"),
        (lambda t: loha_tensors(layers=3), "layer_out_of_range"),
        (lambda t: loha_tensors(layers=1), "missing_tensors"),
        (lambda t: {k: v for k, v in t.items() if k != f"{Q0}.hada_w1_a"}, "incomplete_pair"),
        (lambda t: {**t, f"{Q0}.hada_w1_a": torch.ones(0)}, "empty_tensor"),
        (lambda t: {**t, f"{Q0}.hada_w1_a.default": torch.ones(48, 2)}, "duplicate_tensors"),
        (
            lambda t: {**t, f"{Q0.replace('q_proj', 'k_proj')}.hada_w1_a": torch.ones(2)},
            "untargeted_tensors",
        ),
        (lambda t: {**t, f"{Q0}.hada_t1": torch.ones(2)}, "unknown_tensors"),
        (lambda t: {**t, f"{Q0}.bias": torch.ones(2)}, "bias_tensors"),
        (
            lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(2)},
            "full_weights",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path: Path, change: Any, code: str) -> None:
    fields = config_of("LOHA", r=2)
    write_adapter(tmp_path, fields, loha_tensors())
    read_parts(tmp_path, BASE, MODEL)
    write_adapter(tmp_path, fields, change(loha_tensors()))
    with pytest.raises(AdapterRefused) as refused:
        read_parts(tmp_path, BASE, MODEL)
    assert refused.value.code == code


def test_names_may_hold_the_default_adapter_name(tmp_path: Path) -> None:
    tensors = {f"{name}.default": tensor for name, tensor in loha_tensors().items()}
    found, parts = read_parts(write_adapter(tmp_path, config_of("LOHA", r=2), tensors), BASE, MODEL)
    assert found.ranks == {(0, "q_proj"): 4, (1, "q_proj"): 4} and len(parts.modules) == 2


def test_a_rank_over_the_cap_is_served_as_a_weight_if_it_is_not_that_of_the_file(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, config_of("LOHA", r=2), loha_tensors())
    found, _ = read_parts(tmp_path, BASE, MODEL, max_rank=3)
    assert found.ranks == {} and "whole weights in 2 modules" in found.warnings[-1]
    assert found.only_alone


def test_a_native_rank_over_the_cap_is_refused(tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.{target.path}.miss_block": torch.ones(4, 48)
        for target in BASE.targets
        if target.projection == "q_proj"
    }
    write_adapter(tmp_path, config_of("MISS", r=4), tensors)
    with pytest.raises(AdapterRefused) as refused:
        read_parts(tmp_path, BASE, MODEL, max_rank=3)
    assert refused.value.code == "rank_over_cap"


def ia3_tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"{Q0.replace('.0.', f'.{i}.')}.ia3_l": torch.full((48, 1), value) for i in range(2)}


@pytest.mark.parametrize(("value", "code"), [(1.0, "no_effect"), (float("nan"), "not_finite")])
def test_vectors_are_checked(tmp_path: Path, value: float, code: str) -> None:
    write_adapter(tmp_path, config_of("IA3"), ia3_tensors(value))
    with pytest.raises(AdapterRefused) as refused:
        read_parts(tmp_path, BASE, MODEL)
    assert refused.value.code == code


def test_a_rotation_by_nothing_has_no_effect(tmp_path: Path) -> None:
    tensors = {f"{Q0.replace('.0.', f'.{i}.')}.oft_R.weight": torch.zeros(4, 28) for i in range(2)}
    write_adapter(tmp_path, config_of("OFT"), tensors)
    with pytest.raises(AdapterRefused) as refused:
        read_parts(tmp_path, BASE, MODEL)
    assert refused.value.code == "no_effect"


def test_norms_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    fields = config_of("LN_TUNING", target_modules=["norm", "q_norm"])
    tensors = {
        "base_model.model.model.norm.ln_tuning_layers.weight": torch.ones(32) * 2,
        "base_model.model.model.layers.0.self_attn.q_norm.ln_tuning_layers.weight": torch.ones(12),
    }
    write_adapter(tmp_path, fields, tensors)
    with pytest.raises(AdapterRefused, match="q_norm"):
        read_parts(tmp_path, BASE, MODEL)


def test_heads_and_embeddings_are_refused(tmp_path: Path) -> None:
    fields = config_of("LOHA", r=2, target_modules=["q_proj", "lm_head"])
    write_adapter(tmp_path, fields, loha_tensors())
    with pytest.raises(AdapterRefused, match="reaches lm_head"):
        read_parts(tmp_path, BASE, MODEL)
