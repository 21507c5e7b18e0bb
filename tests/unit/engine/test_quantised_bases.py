"""Engines over quantised checkpoints against PEFT over the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine_factory import make_engine
from tests.kinds_factory import KINDS
from tests.model_factory import save_hf_folder, tiny_transformers_model, tiny_vision_model
from tests.quantised_factory import CASES, quantise_folder, quantised_model
from tests.unit.engine import test_delta_kinds as kinds
from tests.unit.engine import test_dense_families as families

# The formats differ in their dequantisers alone, which have tests of their own.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "awq"]


@pytest.mark.parametrize("name", ["awq", *SLOW])
def test_adapters_of_all_kinds_in_one_batch_equal_peft(name: str, tmp_path: Path) -> None:
    scene = kinds.Scene("llama31", tmp_path / "adapters", [])
    quantised_model(scene.model, tmp_path / "base", CASES[name])
    # The model has the dequantised weights now: PEFT's models of the adapters are made from it.
    for number, kind in enumerate(KINDS):
        scene.folders[kind] = kinds.make_kind(kind, scene.model, tmp_path / kind, seed=number)
        scene.oracles[kind] = kinds.load_kind(kind, scene.model, scene.folders[kind])
        size = scene.vocab_size(kind)
        scene.prompts[kind] = kinds.make_prompt(5 + number % 4, seed=number, vocab_size=size)
    engine = make_engine(scene.model, tmp_path / "base", device_memory_bytes=32 * 2**20)
    kinds.check_logits(engine, scene)
    kinds.check_greedy(engine, scene)


@pytest.mark.parametrize("family", ["phi4_mini", pytest.param("glm4", marks=pytest.mark.slow)])
def test_fused_projections_and_row_maps_of_families(family: str, tmp_path: Path) -> None:
    model = tiny_transformers_model(family)
    folder = quantised_model(model, tmp_path / "base", CASES["gptq_act_order"])
    configs = families.adapter_configs(families.PROJECTIONS[family])
    scene = families.Scene(model, tmp_path / "dense", configs)
    engine = make_engine(model, folder, device_memory_bytes=8 * 2**20)
    families.check_logits(engine, scene)


def test_the_text_part_of_a_vision_model_loads(tmp_path: Path) -> None:
    model = tiny_vision_model("qwen2_5_vl")
    folder = save_hf_folder(model, tmp_path / "base")
    dense = quantise_folder(
        folder,
        CASES["ct_fp8_channel"],
        wanted=lambda name: "language_model" in name and name.endswith("proj.weight"),
    )
    engine = make_engine(model, folder, device_memory_bytes=8 * 2**20)
    model.load_state_dict(dense, strict=False)
    prompt = kinds.make_prompt(9, seed=3)
    (found,) = engine.prompt_logits([(prompt, ())])
    torch.testing.assert_close(found, kinds.logits_of(model, prompt), atol=1e-4, rtol=1e-4)
