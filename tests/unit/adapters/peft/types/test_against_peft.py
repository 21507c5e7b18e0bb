"""Each served PEFT type computes what PEFT computes from the same saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.adapters.packed.extras import ExtraKind
from loramux.adapters.peft.inspection import InspectedAdapter, Inspector
from loramux.adapters.peft.parts import AdapterParts
from tests.adapter_factory import tiny_base_info, tiny_llama, tiny_llama_config
from tests.peft_types_factory import logits_of_parts, logits_of_peft, read_parts, save_type

CONFIG = tiny_llama_config(num_hidden_layers=2, attention_bias=True)
MODEL = tiny_llama(CONFIG)
for _name, _parameter in MODEL.named_parameters():
    if _name.endswith("bias") or "norm" in _name:
        _parameter.data.add_(torch.linspace(-0.4, 0.4, _parameter.numel()))
    elif "layers" in _name:
        # So large that every change of a weight is seen in the logits.
        _parameter.data.mul_(8)
TOKENS = torch.arange(24).view(2, 12) * 3 % CONFIG.vocab_size
BASE_LOGITS = MODEL(TOKENS).logits.detach()
BASE = tiny_base_info(CONFIG)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LOW, WEIGHT, GAIN, BIAS = "low rank", ExtraKind.WEIGHT, ExtraKind.GAIN, ExtraKind.BIAS

# (config class, its arguments, the kinds of parts that serve it)
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "loha_low_rank": ("LoHaConfig", {"r": 2, "alpha": 3, "target_modules": ALL}, {LOW}),
    "loha_weight": ("LoHaConfig", {"r": 5, "target_modules": ["q_proj", "down_proj"]}, {WEIGHT}),
    "loha_patterns": (
        "LoHaConfig",
        {
            "r": 2,
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 6},
            "alpha_pattern": {"up_proj": 1},
            "layers_to_transform": [0],
        },
        {LOW, WEIGHT},
    ),
    "lokr_split": ("LoKrConfig", {"r": 1, "alpha": 4, "target_modules": ALL}, {LOW}),
    "lokr_whole": ("LoKrConfig", {"r": 20, "target_modules": ["q_proj", "o_proj"]}, {WEIGHT}),
    "lokr_both": (
        "LoKrConfig",
        {"r": 2, "decompose_both": True, "decompose_factor": 8, "target_modules": ALL},
        {LOW},
    ),
    "lokr_factor": (
        "LoKrConfig",
        {"r": 2, "decompose_factor": 2, "target_modules": ["v_proj", "gate_proj"]},
        {LOW},
    ),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ALL}, {LOW}),
    "vera_weight": ("VeraConfig", {"r": 64, "target_modules": ["q_proj"]}, {WEIGHT}),
    "miss": ("MissConfig", {"r": 4, "target_modules": ALL}, {LOW}),
    "miss_uneven": ("MissConfig", {"r": 7, "target_modules": ["k_proj", "o_proj"]}, {LOW}),
    "miss_mini": (
        "MissConfig",
        {"r": 4, "mini_r": 8, "init_weights": "mini", "target_modules": ["q_proj", "down_proj"]},
        {LOW},
    ),
    "miss_bat": (
        "MissConfig",
        {"r": 8, "init_weights": "bat", "target_modules": ["q_proj", "up_proj"]},
        {WEIGHT},
    ),
    "ia3_outputs": (
        "IA3Config",
        {"target_modules": ["q_proj", "v_proj", "o_proj"], "feedforward_modules": []},
        {GAIN},
    ),
    "ia3_default": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {GAIN},
    ),
    "ia3_both_sides_of_up": (
        "IA3Config",
        {
            "target_modules": ["up_proj", "gate_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
        {GAIN},
    ),
    "ia3_other_inputs": (
        "IA3Config",
        {"target_modules": ALL, "feedforward_modules": ["q_proj", "gate_proj"]},
        {GAIN, WEIGHT},
    ),
    "ia3_pattern": (
        "IA3Config",
        {
            "target_modules": r".*\.(q_proj|down_proj)",
            "feedforward_modules": r".*layers\.0.*down_proj",
        },
        {GAIN},
    ),
    "beft": ("BeftConfig", {"target_modules": ["q_proj", "v_proj", "gate_proj"]}, {BIAS}),
    "ln_tuning": (
        "LNTuningConfig",
        {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
        {GAIN},
    ),
    "ln_tuning_some": (
        "LNTuningConfig",
        {"target_modules": ".*norm", "exclude_modules": ["model.norm"]},
        {GAIN},
    ),
    "oft": ("OFTConfig", {"oft_block_size": 8, "target_modules": ALL}, {WEIGHT}),
    "oft_adjusted": ("OFTConfig", {"oft_block_size": 7, "target_modules": ["q_proj"]}, {WEIGHT}),
    "oft_blocks": (
        "OFTConfig",
        {"r": 3, "oft_block_size": 0, "target_modules": ["q_proj", "o_proj"]},
        {WEIGHT},
    ),
    "oft_exact": (
        "OFTConfig",
        {"oft_block_size": 8, "use_cayley_neumann": False, "target_modules": ["q_proj", "up_proj"]},
        {WEIGHT},
    ),
    "oft_shared": (
        "OFTConfig",
        {"oft_block_size": 4, "block_share": True, "target_modules": ["q_proj", "v_proj"]},
        {WEIGHT},
    ),
    "oft_constrained": (
        "OFTConfig",
        {"oft_block_size": 4, "coft": True, "eps": 0.5, "target_modules": ["q_proj", "v_proj"]},
        {WEIGHT},
    ),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ALL}, {WEIGHT}),
    "boft_blocks": (
        "BOFTConfig",
        {"boft_block_size": 0, "boft_block_num": 2, "target_modules": ["q_proj", "down_proj"]},
        {WEIGHT},
    ),
    "hra": ("HRAConfig", {"r": 4, "target_modules": ALL}, {WEIGHT}),
    "hra_orthogonal": (
        "HRAConfig",
        {"r": 3, "apply_GS": True, "target_modules": ["q_proj", "down_proj"]},
        {WEIGHT},
    ),
    "adalora": (
        "AdaLoraConfig",
        {"init_r": 4, "lora_alpha": 3, "total_step": 10, "target_modules": ALL},
        {LOW},
    ),
    "adalora_alpha": (
        "AdaLoraConfig",
        {"init_r": 4, "lora_alpha": -1, "total_step": 10, "target_modules": ["q_proj"]},
        {LOW},
    ),
} | {
    f"oft_{terms}_terms": (
        "OFTConfig",
        {"oft_block_size": 8, "num_cayley_neumann_terms": terms, "target_modules": ["q_proj"]},
        {WEIGHT},
    )
    for terms in (2, 3, 4, 7)
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_peft(tmp_path: Path, case: str) -> None:
    name, arguments, kinds = CASES[case]
    save_type(tmp_path, MODEL, getattr(peft, name)(**arguments))
    found, parts = read_parts(tmp_path, BASE, MODEL)
    expected = logits_of_peft(tmp_path, MODEL, TOKENS)
    torch.testing.assert_close(
        logits_of_parts(parts, BASE, MODEL, TOKENS), expected, rtol=0, atol=1e-5
    )
    assert (expected - BASE_LOGITS).abs().max() > 1e-3
    made = {extra.key[2] for extra in parts.extras} | ({LOW} if parts.modules else set())
    assert made == kinds
    assert bool(found.only_alone) == (WEIGHT in kinds)
    check_shapes(found, parts)


def check_shapes(found: InspectedAdapter, parts: AdapterParts) -> None:
    """Check that the parts have the shapes that the header told, and every tensor of the file is
    used.
    """
    assert [(e.key, tuple(e.values.shape)) for e in parts.extras] == [
        (spec.key, (spec.num_rows, spec.width)) for spec in found.extras
    ]
    shapes = {
        (m.target.layer, m.target.projection): (tuple(m.a.shape), tuple(m.b.shape))
        for m in parts.modules
    }
    sides = {(t.layer, t.projection): (t.in_features, t.out_features) for t in BASE.targets}
    assert shapes == {
        key: ((rank, sides[key][0]), (sides[key][1], rank)) for key, rank in found.ranks.items()
    }
    saved = {entry.name for entry in found.contents.used}
    assert len(saved) == len(found.contents.used) and not found.contents.unused


@pytest.mark.filterwarnings("ignore")
def test_adalora_keeps_the_ranks_that_training_left(tmp_path: Path) -> None:
    """PEFT still divides by the rank at the start, and rank 0 is allowed."""
    config = peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj", "v_proj"])
    config.rank_pattern = {
        "model.layers.0.self_attn.q_proj.lora_E": [True, False, True, True],
        "model.layers.1.self_attn.v_proj.lora_E": [False] * 4,
    }
    save_type(tmp_path, MODEL, config)
    found, parts = read_parts(tmp_path, BASE, MODEL)
    assert found.ranks == {(0, "q_proj"): 3, (0, "v_proj"): 4, (1, "q_proj"): 4}
    prefix = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    assert set(found.contents.unused) == {f"{prefix}{part}" for part in "ABE"}
    torch.testing.assert_close(
        logits_of_parts(parts, BASE, MODEL, TOKENS),
        logits_of_peft(tmp_path, MODEL, TOKENS),
        rtol=0,
        atol=1e-5,
    )


def test_vectors_need_no_weights_of_the_base(tmp_path: Path) -> None:
    config = peft.IA3Config(
        target_modules=["q_proj", "down_proj", "o_proj"],
        feedforward_modules=["down_proj", "o_proj"],
    )
    save_type(tmp_path, MODEL, config)
    with Inspector(BASE).open(tmp_path.resolve()) as (found, weights):
        parts = found.contents.make_parts(weights.load().tensors, None)
    assert {spec.kind for spec in found.extras} == {GAIN, WEIGHT}
    assert {extra.key[1] for extra in parts.extras} == {"qkv", "gate_up"}


def test_tensors_of_half_precision_are_computed_in_float32(tmp_path: Path) -> None:
    save_type(tmp_path, MODEL, peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    _, parts = read_parts(tmp_path, BASE, MODEL)
    torch.testing.assert_close(
        logits_of_parts(parts, BASE, MODEL, TOKENS),
        logits_of_peft(tmp_path, MODEL, TOKENS),
        rtol=0,
        atol=1e-5,
    )
