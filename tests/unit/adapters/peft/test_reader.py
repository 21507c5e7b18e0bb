"""Adapter folders are read like PEFT reads them, and broken ones are refused."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux.adapters.peft.folder import short_base_name
from loramux.adapters.peft.inspection import Inspector
from loramux.adapters.peft.parts import LoraModule
from loramux.adapters.peft.reader import check_values, read_adapter
from loramux.adapters.values import rank_maxima
from loramux.errors import AdapterNotFound, AdapterRefused
from tests.adapter_factory import (
    load_with_peft,
    lora_config_dict,
    lora_tensors,
    make_peft_adapter,
    tiny_base_info,
    tiny_llama,
    tiny_llama_config,
    write_adapter,
)

CONFIG = tiny_llama_config()
BASE = tiny_base_info(CONFIG)
MODEL = tiny_llama(CONFIG)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "q_only": {"target_modules": ["q_proj"]},
    "float_alpha": {"lora_alpha": 3.7},
    "negative_alpha": {"lora_alpha": -8},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 7}},
    "alpha_pattern": {"alpha_pattern": {"^model.layers.2.self_attn.q_proj": 32, "v_proj": 1}},
    "both_patterns_rslora": {
        "use_rslora": True,
        "rank_pattern": {"layers.(0|2).*q_proj": 6},
        "alpha_pattern": {"layers.0.*": 5},
    },
    "all_linear": {"target_modules": "all-linear"},
    "all_linear_but_mlp": {"target_modules": "all-linear", "exclude_modules": ".*mlp.*"},
    "regex": {"target_modules": r"model\.layers\.\d+\.(self_attn\.(k|o)|mlp\.up)_proj"},
    "exclude_names": {
        "target_modules": ["q_proj", "down_proj"],
        "exclude_modules": ["layers.1.self_attn.q_proj"],
    },
    "exclude_regex": {"target_modules": ["gate_proj", "o_proj"], "exclude_modules": ".*0.mlp.*"},
    "one_layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "two_layers": {
        "target_modules": ["v_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "gaussian": {"init_lora_weights": "gaussian"},
    "mica": {"init_lora_weights": "mica"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "velora": {"velora_config": {"num_groups": 4}},
    "dropout": {"lora_dropout": 0.5},
}


def assert_same_as_peft(folder: Path) -> None:
    layers = load_with_peft(folder, MODEL)
    adapter = read_adapter(folder, BASE)
    assert {module.target.path for module in adapter.modules} == layers.keys()
    for module in adapter.modules:
        layer = layers[module.target.path]
        assert module.rank == layer.r["default"]
        assert module.alpha == layer.lora_alpha["default"]
        assert module.scale == layer.scaling["default"]
        delta = (module.b @ module.a) * module.scale
        assert torch.equal(delta, layer.get_delta_weight("default"))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_saved_adapter_is_read_as_peft_reads_it(tmp_path: Path, feature: str) -> None:
    assert_same_as_peft(make_peft_adapter(tmp_path, MODEL, **FEATURES[feature]))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning")
def test_fan_in_fan_out_changes_nothing_on_linear_layers(tmp_path: Path) -> None:
    make_peft_adapter(tmp_path, MODEL)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": True}))
    assert_same_as_peft(tmp_path)


def test_a_config_that_says_all_linear_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    """PEFT itself would save the matched names instead."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config = lora_config_dict(target_modules="all-linear")
    assert_same_as_peft(write_adapter(tmp_path, config, lora_tensors(CONFIG, names=names)))


def test_velora_keeps_tensors_that_serving_does_not_need(tmp_path: Path) -> None:
    make_peft_adapter(tmp_path, MODEL, velora_config={"num_groups": 4})
    adapter = read_adapter(tmp_path, BASE)
    assert len(adapter.tensors_unused) == len(adapter.modules)
    assert all(name.endswith("lora_velora_embed") for name in adapter.tensors_unused)


def test_peft_changes_the_base_for_pissa(tmp_path: Path) -> None:
    """On the original base the same tensors compute another result."""
    make_peft_adapter(tmp_path, MODEL, init_lora_weights="pissa")
    layer = load_with_peft(tmp_path, MODEL)["model.layers.0.self_attn.q_proj"]
    original = MODEL.model.layers[0].self_attn.q_proj.weight
    assert not torch.allclose(layer.base_layer.weight, original, atol=1e-3)
    with pytest.raises(AdapterRefused) as refused:
        read_adapter(tmp_path, BASE)
    assert refused.value.code == "changes_base"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_keep_the_type_they_were_saved_in(tmp_path: Path, dtype: torch.dtype) -> None:
    make_peft_adapter(tmp_path, MODEL, dtype=dtype)
    adapter = read_adapter(tmp_path, BASE)
    assert {module.a.dtype for module in adapter.modules} == {dtype}
    elements = sum(module.a.numel() + module.b.numel() for module in adapter.modules)
    assert adapter.size_bytes == elements * dtype.itemsize


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        read_adapter(tmp_path / "gone", BASE)


def test_the_facts_of_a_sound_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG))
    adapter = read_adapter(tmp_path, BASE)
    assert [module.target for module in adapter.modules] == [
        target for target in BASE.targets if target.projection in ("q_proj", "v_proj")
    ]
    assert adapter.cid.startswith("cidv1:sha256:") and len(adapter.cid) == 13 + 64
    assert adapter.path == tmp_path.resolve()
    assert set(adapter.tensors_used) == lora_tensors(CONFIG).keys()
    assert adapter.tensors_unused == adapter.warnings == ()


def test_an_inspection_tells_the_same_without_reading_a_tensor(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG))
    found, adapter = Inspector(BASE).inspect(tmp_path), read_adapter(tmp_path, BASE)
    assert found.config == adapter.config and found.warnings == adapter.warnings
    assert found.size_bytes == adapter.size_bytes
    assert found.ranks == {
        (module.target.layer, module.target.projection): module.rank for module in adapter.modules
    }


def test_an_inspection_refuses_what_the_header_shows(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG))
    with pytest.raises(AdapterRefused, match="at most 1"):
        Inspector(BASE, max_rank=1).inspect(tmp_path)


@pytest.mark.parametrize(
    ("recorded", "same"),
    [
        ("tiny-llama", True),
        ("Owner/Tiny-Llama", True),
        ("../../models/tiny-llama/", True),
        (r"C:\models\tiny-llama", True),
        ("/cache/models--owner--tiny-llama/snapshots/0123abcd", True),
        ("tiny-llama-4bit", False),
        ("owner/other", False),
    ],
)
def test_the_recorded_base_is_compared_by_its_own_name(
    tmp_path: Path, recorded: str, same: bool
) -> None:
    config = lora_config_dict(base_model_name_or_path=recorded)
    write_adapter(tmp_path, config, lora_tensors(CONFIG))
    assert bool(read_adapter(tmp_path, BASE).warnings) == (not same)
    if same:
        read_adapter(tmp_path, BASE, strict_base=True)


def test_a_hub_cache_name_without_owner() -> None:
    assert short_base_name("/x/models--gpt2/snapshots/abc") == "gpt2"


def test_an_unrecorded_base_and_another_task_are_warned_of(tmp_path: Path) -> None:
    config = lora_config_dict(base_model_name_or_path=None, task_type="SEQ_CLS")
    write_adapter(tmp_path, config, lora_tensors(CONFIG))
    warnings = read_adapter(tmp_path, BASE, strict_base=True).warnings
    assert len(warnings) == 2 and "SEQ_CLS" in warnings[1]


def test_one_module_without_effect_is_a_warning(tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)
    tensors[f"{Q0}.lora_B.weight"].zero_()
    write_adapter(tmp_path, lora_config_dict(), tensors)
    (warning,) = read_adapter(tmp_path, BASE).warnings
    assert "model.layers.0.self_attn.q_proj" in warning


def test_factors_that_never_meet_have_no_effect(tmp_path: Path) -> None:
    """Neither A nor B is zero, but each rank is zero in one of them."""
    tensors = lora_tensors(CONFIG)
    for name, tensor in tensors.items():
        (tensor[:2] if ".lora_A." in name else tensor[:, 2:]).zero_()
    write_adapter(tmp_path, lora_config_dict(), tensors)
    with pytest.raises(AdapterRefused) as refused:
        read_adapter(tmp_path, BASE)
    assert refused.value.code == "no_effect"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half", ["A", "B"])
def test_one_value_that_is_not_finite_is_found(
    tmp_path: Path, value: float, dtype: torch.dtype, half: str
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in lora_tensors(CONFIG).items()}
    tensors[f"{Q0}.lora_{half}.weight"][1, 2] = value
    write_adapter(tmp_path, lora_config_dict(), tensors)
    with pytest.raises(AdapterRefused, match=f"lora_{half}") as refused:
        read_adapter(tmp_path, BASE)
    assert refused.value.code == "not_finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 77_777, -1])
def test_one_nan_in_a_large_tensor_is_found(dtype: torch.dtype, position: int) -> None:
    """Large reductions are split between threads and SIMD vectors."""
    a = torch.ones(16, 8192, dtype=dtype)
    a.view(-1)[position] = math.nan
    module = LoraModule(BASE.targets[0], 16, 16, 1.0, a, torch.ones(4, 16, dtype=dtype))
    with pytest.raises(AdapterRefused, match="lora_A"):
        check_values([module], [rank_maxima(module)])


def test_an_effect_beyond_the_first_feature_is_seen() -> None:
    a, b = torch.zeros(4, 32), torch.zeros(48, 4)
    a[2, 5] = b[7, 2] = 1e-30
    module = LoraModule(BASE.targets[0], 4, 8, 2.0, a, b)
    assert check_values([module], [rank_maxima(module)]) == ()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_weight_byte_changes_the_cid(tmp_path: Path, data: st.DataObject) -> None:
    tensors = lora_tensors(CONFIG)
    write_adapter(tmp_path, lora_config_dict(), tensors)
    before = read_adapter(tmp_path, BASE).cid
    weights = tmp_path / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    num_data_bytes = sum(tensor.nbytes for tensor in tensors.values())
    position = data.draw(st.integers(len(content) - num_data_bytes, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    weights.write_bytes(content)
    try:
        after = read_adapter(tmp_path, BASE).cid
    except AdapterRefused as refused:
        assert refused.code == "not_finite"
    else:
        assert after != before


def test_the_same_adapter_in_another_folder_has_the_same_cid(tmp_path: Path) -> None:
    tensors = lora_tensors(CONFIG)
    one = write_adapter(tmp_path / "one", lora_config_dict(), tensors)
    reordered = dict(reversed(lora_config_dict(lora_dropout=0.1).items()))
    two = write_adapter(tmp_path / "two", reordered, tensors)
    assert read_adapter(one, BASE).cid == read_adapter(two, BASE).cid


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    folders = [
        write_adapter(tmp_path / str(seed), lora_config_dict(), lora_tensors(CONFIG, seed=seed))
        for seed in range(6)
    ]
    with ThreadPoolExecutor(4) as threads:
        adapters = list(threads.map(lambda folder: read_adapter(folder, BASE), folders * 3))
    assert len({adapter.cid for adapter in adapters}) == 6
    for index, adapter in enumerate(adapters):
        expected = lora_tensors(CONFIG, seed=index % 6)[f"{Q0}.lora_A.weight"]
        assert torch.equal(adapter.modules[0].a, expected)
