"""`loramux deploy ray` without a cluster: what it prints, and how it fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from loramux.cli.main import app

SPEC = """
name: chat
model_type: text
backend: loramux
backend_kwargs: {model_id: ./model}
lora: {adapters: {sql: adapters/sql}}
resources: {replicas: 3}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    return file


def test_the_configuration_is_printed_as_ray_and_kuberay_read_it(spec: Path) -> None:
    told = CliRunner().invoke(app, ["deploy", "ray", str(spec), "--print-config"])
    assert told.exit_code == 0, told.output
    config = yaml.safe_load(told.output)
    engines, front = config["applications"]
    assert (engines["name"], front["name"]) == ("engines", "front")
    assert engines["args"]["settings"]["model"] == str(spec.parent / "model")
    (engine,) = engines["deployments"]
    assert engine["autoscaling_config"]["min_replicas"] == 3
    assert engine["user_config"]["adapters"]["sql"]["source"] == str(spec.parent / "adapters/sql")


def test_two_things_at_once_are_refused(spec: Path) -> None:
    told = CliRunner().invoke(app, ["deploy", "ray", str(spec), "--update", "--down"])
    assert told.exit_code == 2 and "Choose one" in told.output


def test_a_mistake_in_the_file_is_named(spec: Path) -> None:
    spec.write_text(SPEC.replace("replicas", "replica"))
    told = CliRunner().invoke(app, ["deploy", "ray", str(spec)])
    assert told.exit_code == 2
    assert "resources has an unknown key 'replica'" in told.output.replace("\n", " ")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_extra_is_named(spec: Path) -> None:
    told = CliRunner().invoke(app, ["deploy", "ray", str(spec), "--status"])
    assert told.exit_code == 1 and "loramux[ray]" in told.output
