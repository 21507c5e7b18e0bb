"""The app of deploy/modal_app.py, without an account: its declaration, and the server it starts."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import modal
import pytest

from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.s3_server import free_ports
from tests.serve_flags import served

PROGRAM = Path(__file__).resolve().parents[2] / "deploy" / "modal_app.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("LORAMUX_REGISTRY", raising=False)
    monkeypatch.delenv("LORAMUX_MODEL", raising=False)
    monkeypatch.setenv("LORAMUX_WHEEL", "/wheels/loramux-0.2.0-py3-none-any.whl")
    return loaded()


def loaded() -> ModuleType:
    module = ModuleType("modal_app")
    module.__file__ = str(PROGRAM)
    exec(compile(PROGRAM.read_text(), PROGRAM, "exec"), module.__dict__)
    return module


def test_the_app_declares_one_server(program: ModuleType) -> None:
    assert isinstance(program.app, modal.App) and program.app.name == "loramux"
    assert type(program.Server).__name__ == "Server"
    assert program.DRAIN_S < program.EXIT_S


def test_the_image_has_the_wheel_that_is_named_or_the_newest(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path("/wheels/loramux-0.2.0-py3-none-any.whl") == program.WHEEL
    monkeypatch.delenv("LORAMUX_WHEEL")
    with pytest.raises(SystemExit, match="python -m build"):
        program.find_wheel(tmp_path)
    (tmp_path / "dist").mkdir()
    for age, name in enumerate(("loramux-0.2.0-x.whl", "loramux-0.1.0-x.whl")):
        wheel = tmp_path / "dist" / name
        wheel.touch()
        os.utime(wheel, (1e9 - age, 1e9 - age))
    assert program.find_wheel(tmp_path).name == "loramux-0.2.0-x.whl"


def test_the_server_takes_its_flags(program: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    config = served(program.flags(data=tmp_path, model="/data/base"))
    assert (config.host, config.port, config.model) == ("0.0.0.0", program.PORT, "/data/base")
    assert [module.name for module in config.lora_modules] == ["a", "b"]
    assert config.drain_s == program.DRAIN_S and config.registry == "none"
    assert served(program.flags(data=tmp_path / "none")).lora_modules == ()


@pytest.mark.slow
def test_it_starts_answers_and_ends_as_in_a_container(program: ModuleType, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    config = lora_config_dict(r=4, base_model_name_or_path="model")
    write_adapter(tmp_path / "adapters" / "shout", config, lora_tensors(model.config, seed=1))
    (port,) = free_ports(1)
    flags = program.flags(data=tmp_path, model=str(tmp_path / "model"), host="127.0.0.1")
    flags += ["--port", str(port), "--dtype", "float32", "--device", "cpu"]
    flags += ["--data", str(tmp_path / "data"), "--device-memory", "16MiB"]
    command = (sys.executable, "-m", "loramux.cli.main")
    process = program.start(flags, program=command, port=port)
    try:
        body = {"model": "shout", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        headers = {"content-type": "application/json", "modal-session-id": "shout"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    finally:
        status = program.stop(process)
    assert status == 0


@pytest.mark.slow
def test_a_server_that_does_not_start_fails_the_container(program: ModuleType) -> None:
    command = (sys.executable, "-m", "loramux.cli.main")
    with pytest.raises(RuntimeError, match="did not start"):
        program.start(["--model", "/nothing/here"], program=command)
