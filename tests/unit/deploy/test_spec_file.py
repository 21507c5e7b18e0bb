"""A deployment from a YAML file: paths, defaults, and errors that say what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.config.fields import LoraModule
from loramux.deploy.spec_file import read_spec
from loramux.errors import InvalidRequest
from loramux.specs import LoRAAdapter, LoRAConfig, ModelSpec, ScalingConfig

TEXT = """
name: chat
model_type: text
backend: loramux
backend_kwargs: {model_id: ./model}
lora:
  adapters:
    sql: adapters/sql
    pirate: {source: "hf:owner/pirate", pinned: true}
settings: {drain-s: 60, device-memory: 2GiB, data: data, registry: postgresql://db/x}
limits: {acme: {requests_per_minute: 600}}
resources: {num_gpus: 1, replicas: 3}
fleet:
  surge_percent: 0
  scaling: {min_replicas: 2, max_replicas: 8}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "spec.yaml"
    file.write_text(text)
    return file


def test_a_file_becomes_a_spec_with_paths_from_its_folder(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, TEXT))
    assert spec.is_text and spec.resources.replicas == 3 and spec.resources.num_gpus == 1
    assert spec.lora == LoRAConfig(
        {
            "sql": LoRAAdapter(str(tmp_path / "adapters/sql")),
            "pirate": LoRAAdapter("hf:owner/pirate", pinned=True),
        }
    )
    assert spec.fleet.scaling == ScalingConfig(min_replicas=2, max_replicas=8)
    assert spec.fleet.surge_percent == 0 and spec.fleet.front_port == 8080
    assert spec.settings["data"] == str(tmp_path / "data")
    assert spec.settings["registry"] == "postgresql://db/x"
    config = spec.config
    assert config.model == str(tmp_path / "model") and config.drain_s == 60
    assert config.engine.device_memory_bytes == 2 * 2**30
    assert config.lora_modules[0] == LoraModule("sql", str(tmp_path / "adapters/sql"))


def test_a_file_of_an_image_model(tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    text = """
name: flux
model_type: diffusion
backend: flux
backend_kwargs: {model_id: flux, torch_dtype: bfloat16}
lora: {adapters: {ink: {source: ink.safetensors, weight: 0.8}}, default: ink}
"""
    spec = read_spec(written(tmp_path, text))
    assert spec.config.images.image_lora == (f"ink={tmp_path / 'ink.safetensors'}@0.8",)
    assert spec.serve_settings["image_default_lora"] == "ink"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: chat", "nam: chat"), "unknown key 'nam'"),
        (("name: chat\n", ""), "has no name"),
        (("drain-s: 60", "drains: 60"), "unknown key 'drains'"),
        (("drain-s: 60", "drain-s: soon"), "must be a number of seconds"),
        (("drain-s: 60", "port: 9000"), "fleet.engine_port"),
        (("replicas: 3", "replicas: many"), "resources.replicas must be int"),
        (("pinned: true", "pinned: 1"), "pinned must be bool"),
        (("min_replicas: 2", "min_replicas: 9"), "min_replicas <= max_replicas"),
        (("surge_percent: 0", "proxy_port: 8080"), "must differ"),
        (("requests_per_minute", "requests_per_hour"), "no limit 'requests_per_hour'"),
        (("model_type: text", "model_type: sound"), "not served"),
        (("backend: loramux", "backend: flux"), "not one of loramux"),
        (("pinned: true}", "weight: 0.5}"), "is for images"),
        (("settings:", "settings: ["), "not valid YAML"),
        ((TEXT, "- a list"), "must be a table"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        read_spec(written(tmp_path, TEXT.replace(*change)))
    assert str(tmp_path / "spec.yaml") in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_spec(tmp_path / "none.yaml")


def test_a_spec_needs_what_its_kind_needs() -> None:
    with pytest.raises(InvalidRequest, match="LoRAConfig.default is for images"):
        ModelSpec(
            name="x",
            model_type="text",
            backend="loramux",
            lora=LoRAConfig({"a": LoRAAdapter("a")}, default="a"),
        )
    with pytest.raises(InvalidRequest, match="write it to settings"):
        ModelSpec(name="x", model_type="text", backend="loramux", backend_kwargs={"dtype": "x"})
