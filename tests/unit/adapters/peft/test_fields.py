"""PEFT's LoraConfig is the reference for the list of fields."""

from __future__ import annotations

import dataclasses
import json

import peft
import pytest

from loramux.adapters.peft.config import parse_config
from loramux.adapters.peft.fields import HARMLESS, HONOURED, REFUSED
from loramux.errors import AdapterRefused
from tests.adapter_factory import lora_config_dict

FIELDS = [field.name for field in dataclasses.fields(peft.LoraConfig)]

# One effective value for each refused field.
ACTIVE = {
    "arrow_config": {"top_k": 2},
    "kasa_config": {},
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"x": 1},
    "monteclora_config": {},
    "use_bdlora": {},
    "use_qalora": True,
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_peft_is_classified_once(name: str) -> None:
    assert (name in HONOURED) + (name in HARMLESS) + (name in REFUSED) == 1


def test_no_field_is_classified_that_peft_never_had() -> None:
    assert (HONOURED | HARMLESS.keys() | REFUSED.keys()) - set(FIELDS) == {"merge_weights"}


def test_the_defaults_of_peft_pass() -> None:
    written = peft.LoraConfig(target_modules=["q_proj"]).to_dict()
    written["target_modules"] = list(written["target_modules"])
    parse_config(json.loads(json.dumps(written)))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_changes_the_result_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(AdapterRefused, match=name) as refused:
        parse_config(lora_config_dict(**{name: ACTIVE[name]}))
    assert refused.value.code == "unsupported_field"
    assert refused.value.fix


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_neutral_value_of_a_refused_field_passes(name: str) -> None:
    for value in REFUSED[name].neutral:
        parse_config(lora_config_dict(**{name: value}))


@pytest.mark.parametrize("name", ["use_bdlora", "arrow_config", "kasa_config", "monteclora_config"])
def test_peft_takes_an_empty_object_as_on(name: str) -> None:
    assert getattr(peft.LoraConfig(**{name: {}}), name)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_field_passes_with_any_value(name: str) -> None:
    for value in (None, True, 0.5, "text", {"a": [1]}):
        parse_config(lora_config_dict(**{name: value}))
