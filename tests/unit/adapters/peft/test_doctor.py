from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from loramux.adapters.peft.doctor import describe, examine
from loramux.adapters.peft.reader import read_adapter
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.broken_adapters import BROKEN, Broken

CONFIG = tiny_llama_config()
BASE = tiny_base_info(CONFIG)


def test_a_sound_adapter_is_described(tmp_path: Path) -> None:
    config = lora_config_dict(alpha_pattern={"v_proj": 2}, base_model_name_or_path="other")
    write_adapter(tmp_path, config, lora_tensors(CONFIG))
    report = examine(tmp_path, BASE)
    assert report.ok and report.refusal is None
    assert report.cid == read_adapter(tmp_path, BASE).cid
    assert [(module.rank, module.scale) for module in report.modules] == [(4, 2.0), (4, 0.5)] * 3
    assert report.modules[0].path == "model.layers.0.self_attn.q_proj"
    assert report.modules[0].dtype == "float32"
    assert report.tensors_used == 12
    assert report.size_bytes == sum(tensor.nbytes for tensor in lora_tensors(CONFIG).values())
    assert "'other'" in report.warnings[0]


@pytest.mark.parametrize("broken", [BROKEN[0], BROKEN[-1]], ids=lambda broken: broken.name)
def test_a_broken_adapter_is_a_finding(tmp_path: Path, broken: Broken) -> None:
    folder = tmp_path / "adapter"
    broken.build(folder, CONFIG)
    report = examine(folder, BASE, max_rank=broken.max_rank, strict_base=broken.strict_base)
    assert not report.ok and report.refusal is not None
    assert report.refusal.code == broken.code
    assert json.loads(json.dumps(report.to_dict()))["refusal"]["code"] == broken.code


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    report = examine(tmp_path / "gone", BASE)
    assert report.refusal is not None and report.refusal.code == "not_found"


def test_the_report_is_json_with_the_callers_probe(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_config_dict(), lora_tensors(CONFIG))
    report = describe(read_adapter(tmp_path, BASE), BASE)
    assert report.to_dict()["max_logit_change"] is None
    probed = dataclasses.replace(report, max_logit_change=0.25)
    fields = json.loads(json.dumps(probed.to_dict()))
    assert fields["ok"] is True and fields["max_logit_change"] == 0.25
    assert fields["modules"][0]["rank"] == 4
