"""PEFT's matching is the reference, on the modules of a tiny Llama."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from loramux.adapters.peft.config import parse_config
from loramux.adapters.peft.targets import plan_modules, targeted_paths
from loramux.adapters.peft.vocabulary import vocabulary_targets
from loramux.errors import AdapterRefused
from tests.adapter_factory import lora_config_dict, tiny_base_info, tiny_llama_config

BASE = tiny_base_info(tiny_llama_config(num_hidden_layers=12))
PATHS = [target.path for target in BASE.targets]

SELECTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["self_attn.q_proj", "mlp.up_proj", "linear_fc2"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.11.mlp.up_proj"]},
    {"target_modules": ["1.self_attn.q_proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.(0|2)\..*proj"},
    {"target_modules": r"(?i).*Q_PROJ"},
    {"target_modules": "q_proj"},
    {"target_modules": ".*self_attn.*", "exclude_modules": ".*layers.1.*"},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": "q_proj"},
    {"target_modules": ["q_proj"], "exclude_modules": []},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 11, 99]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": r"l.*s"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []},
    {
        "target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"],
        "layers_to_transform": [2],
    },
]
PATTERNS: list[dict[str, int]] = [
    {},
    {"q_proj": 16},
    {"proj": 16},
    {".*proj": 16, "q_proj": 2},
    {"q_proj": 2, ".*proj": 16},
    {"layers.1.self_attn.q_proj": 16},
    {"layers.1.*": 16},
    {r"model\.layers\.(0|3)\.self_attn\.q_proj": 16},
    {"^model.layers.1.self_attn.q_proj": 16},
    {"^self_attn.q_proj": 16},
    {"layers.1": 16, "1.self_attn.q_proj": 2},
    {"q_proj|v_proj": 16},
    {path: 3 + index for index, path in enumerate(PATHS)},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_the_targets_are_those_of_peft(selection: dict[str, Any]) -> None:
    oracle = LoraConfig(**selection)
    expected = {path for path in PATHS if check_target_module_exists(oracle, path)}
    assert targeted_paths(parse_config(lora_config_dict(**selection)), PATHS) == expected


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: str(pattern)[:40])
def test_ranks_and_alphas_are_those_of_peft(pattern: dict[str, int]) -> None:
    config = lora_config_dict(
        target_modules=["q_proj", "v_proj", "up_proj"], rank_pattern=pattern, alpha_pattern=pattern
    )
    plans = plan_modules(parse_config(config), BASE.targets)
    for plan in plans:
        key = get_pattern_key(pattern.keys(), plan.target.path)
        assert plan.rank == pattern.get(key, config["r"])
        assert plan.alpha == pattern.get(key, config["lora_alpha"])
        assert plan.scale == plan.alpha / plan.rank


def test_rslora_divides_by_the_root_of_each_rank() -> None:
    config = lora_config_dict(use_rslora=True, rank_pattern={"q_proj": 16}, lora_alpha=8)
    plans = plan_modules(parse_config(config), BASE.targets)
    assert {plan.target.projection: plan.scale for plan in plans} == {"q_proj": 2.0, "v_proj": 4.0}


def test_all_linear_means_every_target_but_no_head() -> None:
    plans = plan_modules(parse_config(lora_config_dict(target_modules="all-linear")), BASE.targets)
    assert [plan.target for plan in plans] == list(BASE.targets)


def test_all_linear_can_be_narrowed() -> None:
    config = lora_config_dict(target_modules="all-linear", exclude_modules=".*mlp.*")
    plans = plan_modules(parse_config(config), BASE.targets)
    assert {plan.target.projection for plan in plans} == {"q_proj", "k_proj", "v_proj", "o_proj"}


VOCABULARY = dict(zip(("embedding", "head"), vocabulary_targets(BASE), strict=True))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lm_head"], {"lm_head"}),
        (["embed_tokens"], {"model.embed_tokens"}),
        (["model.embed_tokens", "lm_head"], {"model.embed_tokens", "lm_head"}),
        (r".*(embed_tokens|head)", {"model.embed_tokens", "lm_head"}),
        ("all-linear", set()),
    ],
)
def test_head_and_embedding_are_targets_but_not_of_all_linear(
    names: Any, expected: set[str]
) -> None:
    config = parse_config(lora_config_dict(target_modules=names))
    plans = plan_modules(config, BASE.targets, **VOCABULARY)
    assert {plan.target.path for plan in plans if plan.target.layer < 0} == expected


def test_tied_weights_are_adapted_together_on_request() -> None:
    config = lora_config_dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    for are_tied in (False, True):
        plans = plan_modules(parse_config(config), BASE.targets, **VOCABULARY, are_tied=are_tied)
        assert ("lm_head" in {plan.target.path for plan in plans}) == are_tied


SAVED: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
    {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.1"]},
    {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["q_proj", "norm"]},
]


@pytest.mark.parametrize("selection", SAVED, ids=str)
def test_saved_modules_take_no_lora(selection: dict[str, Any]) -> None:
    oracle = LoraConfig(**selection)
    expected = {path for path in PATHS if check_target_module_exists(oracle, path)}
    plans = plan_modules(parse_config(lora_config_dict(**selection)), BASE.targets)
    assert {plan.target.path for plan in plans} == expected


def test_a_lora_in_a_saved_module_is_refused() -> None:
    """PEFT compares the end of a module's path here, and whole parts of it for targets."""
    config = parse_config(lora_config_dict(modules_to_save=["_proj"]))
    with pytest.raises(AdapterRefused, match="modules_to_save") as refused:
        plan_modules(config, BASE.targets)
    assert refused.value.code == "bad_value"


def test_a_head_that_is_excluded_again_is_no_target() -> None:
    config = lora_config_dict(target_modules=["q_proj", "lm_head"], exclude_modules=["lm_head"])
    assert len(plan_modules(parse_config(config), BASE.targets, **VOCABULARY)) == 12


def test_a_config_for_other_modules_is_refused() -> None:
    config = parse_config(lora_config_dict(target_modules=["c_attn"]))
    with pytest.raises(AdapterRefused, match="c_attn") as refused:
        plan_modules(config, BASE.targets)
    assert refused.value.code == "no_targets"


def test_many_whole_paths_with_chosen_layers_are_not_guessed() -> None:
    config = parse_config(lora_config_dict(target_modules=PATHS, layers_to_transform=[1]))
    with pytest.raises(AdapterRefused) as refused:
        plan_modules(config, BASE.targets)
    assert refused.value.code == "bad_value"
