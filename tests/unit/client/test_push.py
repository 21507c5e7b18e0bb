"""What the client sends when a trainer pushes: tensors of torch and numpy, PEFT's configs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load

from loramux.client.push import config_fields, push_call

CONFIG = {"r": 4, "peft_type": "LORA"}


def test_tensors_go_as_safetensors_with_the_config_beside_them() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    call = push_call("p/q", {"a": a.T.requires_grad_()}, CONFIG, version=3)
    assert (call.method, call.path) == ("POST", "/v1/adapters/p/q:push?version=3")
    assert call.headers["content-type"] == "application/octet-stream"
    assert json.loads(call.headers["x-loramux-config"]) == CONFIG
    assert call.body is not None
    torch.testing.assert_close(load(call.body)["a"], a.T)


@pytest.mark.parametrize(
    "tensors", [{"a": np.ones((2, 2), np.float32)}, {"a": torch.ones(2, 2)}], ids=["numpy", "torch"]
)
def test_arrays_and_tensors_make_the_same_bytes(tensors: Any) -> None:
    body = push_call("n", tensors, CONFIG).body
    assert body is not None and load(body)["a"].tolist() == [[1, 1], [1, 1]]


def test_a_config_of_peft_is_sent_as_peft_saves_it(tmp_path: Any) -> None:
    config = LoraConfig(r=4, target_modules={"v_proj", "q_proj"}, task_type="CAUSAL_LM")
    call = push_call("n", {}, config)
    sent = json.loads(call.headers["x-loramux-config"])
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {**sent, "target_modules": None} == {**saved, "target_modules": None}
    assert sorted(sent["target_modules"]) == sorted(saved["target_modules"])
    assert config_fields(CONFIG) == CONFIG


def test_a_long_config_goes_as_a_form() -> None:
    config = {**CONFIG, "rank_pattern": {f"layer.{number}.q_proj": 2 for number in range(1000)}}
    call = push_call("n", {"a": torch.ones(1)}, config)
    assert call.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert (
        call.body is not None and b'name="config"' in call.body and b'name="weights"' in call.body
    )
